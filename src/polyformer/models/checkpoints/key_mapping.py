"""The table between a public checkpoint's tensors and ours: one table, both directions.

A key mapping relates their names of tensors to ours: whole modules ("attention.self.query": "attention.query"
relates weight and bias) or single tensors; `{i}` is the number of a layer. If one of their tensors contains
several of ours, or has another memory layout, a `Converter` converts it.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Converter:
    """The conversion of one of their tensors to ours and back; the base class leaves it unchanged."""

    ours: tuple[str, ...]

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Convert their tensor to our tensors."""
        return (theirs,)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Convert our tensors to their tensor."""
        return ours[0]


@dataclasses.dataclass(frozen=True)
class Fused(Converter):
    """Several projections of one size in one matrix: weights [n E', E], biases [n E']."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split [n E', ...] into n tensors [E', ...]."""
        return theirs.chunk(len(self.ours))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Join n tensors [E', ...] to [n E', ...]."""
        return torch.cat(list(ours))


@dataclasses.dataclass(frozen=True)
class Transposed(Fused):
    """Several projections in one matrix with weights [E, n E']: the `Conv1D` of the first GPTs."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split weights [E, n E'] into n times [E', E], or biases [n E'] into n times [E']."""
        return super().split(theirs.T if theirs.dim() == 2 else theirs)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Join n weights [E', E] to [E, n E'], or n biases [E'] to [n E']."""
        fused = super().join(ours)
        return fused.T if fused.dim() == 2 else fused


KeyMapping = Mapping[str, "str | Converter"]

ENDINGS = ("", ".weight", ".bias")
"""Suffixes after a key of the table: it names a tensor, or a module that has these tensors."""


def transposed(*ours: str) -> Converter:
    """Return a `Transposed` of these modules of ours."""
    return Transposed(ours)


def layered(theirs: str, ours: str, mapping: KeyMapping) -> dict[str, str | Converter]:
    """Return a layer's table with both sides' paths to the layer, which contain `{i}`."""
    return {
        f"{theirs}.{key}": f"{ours}.{target}"
        if isinstance(target, str)
        else dataclasses.replace(target, ours=tuple(f"{ours}.{name}" for name in target.ours))
        for key, target in mapping.items()
    }


@dataclasses.dataclass(frozen=True)
class Link:
    """The relation of one of their tensors to ours."""

    theirs: str
    converter: Converter


def links(mapping: KeyMapping, own: Iterable[str], layers: int, group: int = 1) -> Iterator[Link]:
    """Yield the table tensor by tensor, for a model with `layers` layers and the tensors `own`.

    group: the number of our layers per layer of theirs; `{i}` is theirs, and `{j}` counts layers in it.
    """
    have = set(own)
    for theirs, target in mapping.items():
        converter = Converter((target,)) if isinstance(target, str) else target
        numbers = range(layers) if "{i}" in theirs else range(1)
        for i in numbers:
            for ending in ENDINGS:
                ours = tuple(name.replace("{i}", str(i)) + ending for name in converter.ours)
                if have.issuperset(ours):
                    key = theirs.replace("{i}", str(i // group)).replace("{j}", str(i % group)) + ending
                    yield Link(key, dataclasses.replace(converter, ours=ours))
