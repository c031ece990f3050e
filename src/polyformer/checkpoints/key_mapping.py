"""The table between a public checkpoint's tensors and ours: one table, both directions.

A key mapping ties their names of tensors to ours: whole modules ("attention.self.query": "attention.query"
ties weight and bias) or single tensors; `{i}` stands for the number of a layer. Where one of their tensors
holds several of ours, or lies differently in memory, a `Converter` says how.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Converter:
    """How one of their tensors becomes ours and back; this one takes it as it is."""

    ours: tuple[str, ...]

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Our tensors of theirs."""
        return (theirs,)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Their tensor of ours."""
        return ours[0]


@dataclasses.dataclass(frozen=True)
class Fused(Converter):
    """Several projections of one size in one: weights [n E', E], biases [n E']."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """[n E', ...] -> n times [E', ...]."""
        return theirs.chunk(len(self.ours))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """n times [E', ...] -> [n E', ...]."""
        return torch.cat(list(ours))


@dataclasses.dataclass(frozen=True)
class Transposed(Fused):
    """The same with weights as [E, n E']: the `Conv1D` of the first GPTs."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Weights [E, n E'] -> n times [E', E]; biases [n E'] -> n times [E']."""
        return super().split(theirs.T if theirs.dim() == 2 else theirs)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Weights n times [E', E] -> [E, n E']; biases n times [E'] -> [n E']."""
        fused = super().join(ours)
        return fused.T if fused.dim() == 2 else fused


KeyMapping = Mapping[str, "str | Converter"]

ENDINGS = ("", ".weight", ".bias")
"""What a key of the table may continue with: it names a tensor, or a module that has these."""


def transposed(*ours: str) -> Converter:
    """A `Transposed` of these modules of ours."""
    return Transposed(ours)


def layered(theirs: str, ours: str, mapping: KeyMapping) -> dict[str, str | Converter]:
    """A layer's table behind both sides' paths to the layer, which hold `{i}`."""
    return {
        f"{theirs}.{key}": f"{ours}.{target}"
        if isinstance(target, str)
        else dataclasses.replace(target, ours=tuple(f"{ours}.{name}" for name in target.ours))
        for key, target in mapping.items()
    }


@dataclasses.dataclass(frozen=True)
class Link:
    """One of their tensors, and how it becomes ours."""

    theirs: str
    converter: Converter


def links(mapping: KeyMapping, own: Iterable[str], layers: int) -> Iterator[Link]:
    """The table written out, tensor by tensor, for a model of so many layers whose tensors are `own`."""
    have = set(own)
    for theirs, target in mapping.items():
        converter = Converter((target,)) if isinstance(target, str) else target
        numbers = range(layers) if "{i}" in theirs else range(1)
        for i in numbers:
            for ending in ENDINGS:
                ours = tuple(name.replace("{i}", str(i)) + ending for name in converter.ours)
                if have.issuperset(ours):
                    key = theirs.replace("{i}", str(i)) + ending
                    yield Link(key, dataclasses.replace(converter, ours=ours))
