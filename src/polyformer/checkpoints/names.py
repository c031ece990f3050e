"""The table between a public checkpoint's tensors and ours: one table, both directions.

A table maps their names to ours, whole modules ("attention.self.query": "attention.query" ties weight and
bias) or single tensors; `{i}` stands for the number of a layer. Where one of theirs is made of several of
ours, or lies differently in memory, a `Part` says how.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """How a tensor of theirs is made of ours, here: it is the same."""

    ours: tuple[str, ...]

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Ours of theirs."""
        return (theirs,)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs of ours."""
        return ours[0]


@dataclasses.dataclass(frozen=True)
class Joined(Part):
    """Several equal projections as one: weights [n E', E], biases [n E']."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return theirs.chunk(len(self.ours))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(ours))


@dataclasses.dataclass(frozen=True)
class Transposed(Joined):
    """The same with weights as [E, n E'], the first GPTs' one-wide convolution."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return super().split(theirs.T if theirs.dim() == 2 else theirs)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        joined = super().join(ours)
        return joined.T if joined.dim() == 2 else joined


Names = Mapping[str, "str | Part"]

ENDINGS = ("", ".weight", ".bias")
"""What a table's name may go on with: it is a tensor, or a module that has these."""


def transposed(*ours: str) -> Part:
    return Transposed(ours)


def joined(*ours: str) -> Part:
    return Joined(ours)


def layered(theirs: str, ours: str, names: Names) -> dict[str, str | Part]:
    """A layer's table with both sides' paths to the layer, which hold `{i}`."""
    return {
        f"{theirs}.{name}": f"{ours}.{one}"
        if isinstance(one, str)
        else dataclasses.replace(one, ours=tuple(f"{ours}.{part}" for part in one.ours))
        for name, one in names.items()
    }


@dataclasses.dataclass(frozen=True)
class Link:
    """One tensor of theirs and those of ours that it holds."""

    theirs: str
    part: Part


def links(table: Names, own: Iterable[str], layers: int) -> Iterator[Link]:
    """The table written out for the tensors `own` of a model with so many layers."""
    have = set(own)
    for theirs, one in table.items():
        part = Part((one,)) if isinstance(one, str) else one
        numbers = range(layers) if "{i}" in theirs else range(1)
        for i in numbers:
            for suffix in ENDINGS:
                ours = tuple(name.replace("{i}", str(i)) + suffix for name in part.ours)
                if have.issuperset(ours):
                    yield Link(theirs.replace("{i}", str(i)) + suffix, dataclasses.replace(part, ours=ours))
