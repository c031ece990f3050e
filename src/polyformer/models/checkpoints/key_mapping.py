"""The table between a public checkpoint's tensors and ours: one table, both directions.

A key mapping relates their names of tensors to ours: whole modules ("attention.self.query": "attention.query"
relates weight and bias) or single tensors; `{i}` is the number of a layer, `{e}` of an expert, and "[a|b]"
on both sides means two entries. With `{e}` only in ours, their tensor contains the tensors of all experts. If
one of their tensors contains several of ours, is a part of ours (`Part`, in the order of the table), or has
another memory layout, a `Converter` converts it.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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

    def for_config(self, config: Any) -> "Converter":
        """Return the converter with the sizes of a model that it needs."""
        return self


@dataclasses.dataclass(frozen=True)
class Unsqueezed(Converter):
    """A tensor that has an additional dimension of length 1 at `dim` in their files."""

    dim: int = 0

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Remove the dimension."""
        return (theirs.squeeze(self.dim),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Add the dimension."""
        return ours[0].unsqueeze(self.dim)


@dataclasses.dataclass(frozen=True)
class Taps(Converter):
    """The weights of a depthwise convolution of width w: theirs [C, 1, w], ours [w, C]."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Put taps before channels."""
        return (theirs.squeeze(1).T.contiguous(),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Put channels before taps."""
        return ours[0].T.unsqueeze(1)


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
class Part(Converter):
    """The tensor `number` of `count` tensors of one size that ours has one after the other."""

    number: int
    count: int

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the part of our tensor."""
        return ours[0].chunk(self.count)[self.number]

    def whole(self, parts: Tensor) -> Tensor:
        """Return our tensor from all parts, one after the other."""
        return parts


@dataclasses.dataclass(frozen=True)
class Interleaved(Converter):
    """Projections of several sizes in one matrix: in each of its groups of rows, a part of every projection.

    `layout` returns the groups of a model, and the rows of each projection. With a single tensor of ours, it
    has the projections one after the other.
    """

    layout: Callable[[Any], tuple[int, Sequence[int]]]
    groups: int = 1
    sizes: Sequence[int] = ()

    def for_config(self, config: Any) -> "Interleaved":
        """Return the converter for the groups and rows of a model."""
        groups, sizes = self.layout(config)
        return dataclasses.replace(self, groups=groups, sizes=sizes)

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split rows into the projections."""
        rows = theirs.unflatten(0, (self.groups, -1)).split([size // self.groups for size in self.sizes], 1)
        parts = [part.flatten(0, 1) for part in rows]
        return [torch.cat(parts)] if len(self.ours) == 1 else parts

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Join the projections group by group."""
        parts = ours[0].split(self.sizes) if len(ours) == 1 else ours
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], 1).flatten(0, 1)


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

# Suffixes after a key of the table: it names a tensor, or a module that has these tensors.
ENDINGS = ("", ".weight", ".bias")


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


@functools.lru_cache
def alternatives(pattern: str) -> tuple[str, ...]:
    """Return the names that a pattern abbreviates: "norm[1|2]" for "norm1" and "norm2"."""
    listed = re.search(r"\[(.*)\]", pattern)
    if listed is None:
        return (pattern,)
    return tuple(pattern[: listed.start()] + name + pattern[listed.end() :] for name in listed[1].split("|"))


def expanded(mapping: KeyMapping) -> dict[str, str | Converter]:
    """Return a key mapping with an entry for each name of its patterns."""
    table: dict[str, str | Converter] = {}
    for theirs, target in mapping.items():
        ours = alternatives(target) if isinstance(target, str) else (target,)
        table |= zip(alternatives(theirs), ours, strict=True)
    return table


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
        # Entries without {i} are outside the layers.
        numbers = range(layers) if "{i}" in theirs else range(1)
        for i in numbers:
            for ending in ENDINGS:
                ours = tuple(name.replace("{i}", str(i)) + ending for name in converter.ours)
                key = theirs.replace("{i}", str(i // group)).replace("{j}", str(i % group)) + ending
                for name, parts in _by_experts(key, ours, have):
                    # A module without a bias has none on either side; a layer may have no experts.
                    if parts and have.issuperset(parts):
                        yield Link(name, dataclasses.replace(converter, ours=parts))


def _by_experts(theirs: str, ours: tuple[str, ...], have: set[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield an entry for each expert, or with `{e}` only in `ours` a single entry with all experts."""
    if not any("{e}" in name for name in ours):
        yield theirs, ours
        return
    numbers = itertools.takewhile(lambda e: ours[0].replace("{e}", str(e)) in have, itertools.count())
    experts = [tuple(name.replace("{e}", str(e)) for name in ours) for e in numbers]
    if "{e}" not in theirs:
        yield theirs, tuple(itertools.chain(*experts))
    else:
        yield from ((theirs.replace("{e}", str(e)), parts) for e, parts in enumerate(experts))
