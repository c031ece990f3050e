"""Patterns that differ from head to head, or from layer to layer."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.patterns.base import Pattern
from polyformer.patterns.implied import Causal, Full
from polyformer.patterns.layout import Keys
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class _Choice(Pattern):
    """Several patterns, taken in turn."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if isinstance(self.patterns, Pattern) or not all(
            isinstance(pattern, Pattern) for pattern in self.patterns
        ):
            raise InputError(
                f"{type(self).__name__}: expected a list of patterns, got {quote(self.patterns)}"
            )
        if not self.patterns:
            raise InputError(f"{type(self).__name__}: expected 1 pattern or more, got none")
        object.__setattr__(self, "patterns", tuple(self.patterns))

    def is_static(self) -> bool:
        """Where all are."""
        return all(pattern.is_static() for pattern in self.patterns)

    def causal(self) -> bool:
        """Where all are."""
        return all(pattern.causal() for pattern in self.patterns)

    def bind(self, by_slot: bool, device: torch.device) -> Pattern:
        """All bound."""
        return self if self.is_static() else self.each(lambda pattern: pattern.bind(by_slot, device))

    def turn(self, index: int) -> Pattern:
        """The pattern whose turn it is."""
        return self.patterns[index % len(self.patterns)]

    def each(self, function: Callable[[Pattern], Pattern]) -> "_Choice":
        """`function` applied to all of them."""
        return type(self)(tuple(map(function, self.patterns)))


@dataclasses.dataclass(frozen=True)
class PerHead(_Choice):
    """Head h has pattern h; with fewer patterns than heads they begin again."""

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.3"

    def layer_pattern(self, layer: int) -> Pattern:
        """That of each."""
        return self.each(lambda pattern: pattern.layer_pattern(layer))

    def head_pattern(self, head: int) -> Pattern:
        """patterns[head % number of patterns]."""
        return self.turn(head).head_pattern(head)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """patterns[h % number of patterns](i, j)."""
        allowed = self.patterns[0].allows(context, b, h, q_idx, kv_idx)
        for index, pattern in enumerate(self.patterns[1:], 1):
            mine = h % len(self.patterns) == index
            allowed = torch.where(mine, pattern.allows(context, b, h, q_idx, kv_idx), allowed)
        return allowed

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """What some head needs, and what all heads have without a mask."""
        per_pattern = [pattern.keys(context, start, stop) for pattern in self.patterns]
        combined = per_pattern[0]
        for keys in per_pattern[1:]:
            combined = Keys((combined | keys).some, (combined & keys).full)
        return combined

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Those of all."""
        return tuple(cut for pattern in self.patterns for cut in pattern.cuts(context))

    @classmethod
    def examples(cls) -> tuple["PerHead", ...]:
        """Small instances that the contract tests run."""
        return (cls((Causal(), Full())),)


@dataclasses.dataclass(frozen=True)
class PerLayer(_Choice):
    """Layer l of a stack has pattern l; with fewer patterns than layers they begin again."""

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.3"

    def layer_pattern(self, layer: int) -> Pattern:
        """patterns[layer % number of patterns]."""
        return self.turn(layer).layer_pattern(layer)

    def head_pattern(self, head: int) -> Pattern:
        """That of each."""
        return self.each(lambda pattern: pattern.head_pattern(head))

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Outside a stack there is one layer, the first."""
        return self.turn(0).allows(context, b, h, q_idx, kv_idx)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Of the first, as `allows`."""
        return self.turn(0).keys(context, start, stop)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Of the first, as `allows`."""
        return self.turn(0).cuts(context)

    def relative(self, context: Context) -> bool:
        """Of the first, as `allows`."""
        return self.turn(0).relative(context)

    @classmethod
    def examples(cls) -> tuple["PerLayer", ...]:
        """Small instances that the contract tests run."""
        return (cls((Causal(), Full())),)
