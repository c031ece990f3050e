"""Patterns joined: `&` allows what both allow, `|` what either does, `Without` what the left alone does."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor

from polyformer.patterns.base import MaskMod, Pattern
from polyformer.patterns.layout import Keys, subtract
from polyformer.patterns.user_defined import as_pattern
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class _Pair(Pattern):
    """Two patterns joined; `&` and `|` differ only in how they join."""

    left: Pattern
    right: Pattern

    sign: ClassVar[str] = ""

    def __init_subclass__(cls, named: bool = True, **options: object) -> None:
        super().__init_subclass__(named, **options)
        Pattern.operators[cls.sign] = cls.of

    @classmethod
    def of(cls, left: Pattern | MaskMod, right: Pattern | MaskMod) -> Self:
        """Both joined; a bare `mask_mod` joins as a pattern."""
        return cls(as_pattern(left), as_pattern(right))

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Those of both."""
        return (*self.left.cuts(context), *self.right.cuts(context))

    def relative(self, context: Context) -> bool:
        """Where both are."""
        return self.left.relative(context) and self.right.relative(context)

    def is_static(self) -> bool:
        """Where both are."""
        return self.left.is_static() and self.right.is_static()

    def causal(self) -> bool:
        """Where both are."""
        return self.left.causal() and self.right.causal()

    def mapped(self, function: Callable[[Pattern], Pattern]) -> Pattern:
        """The function applied inside both."""
        return self._of(self.left.mapped(function), self.right.mapped(function))

    def bind(self, by_slot: bool, device: torch.device) -> Pattern:
        """Both bound."""
        return self._of(self.left.bind(by_slot, device), self.right.bind(by_slot, device))

    def layer_pattern(self, layer: int) -> Pattern:
        """That of both."""
        return self._of(self.left.layer_pattern(layer), self.right.layer_pattern(layer))

    def head_pattern(self, head: int) -> Pattern:
        """That of both."""
        return self._of(self.left.head_pattern(head), self.right.head_pattern(head))

    def _of(self, left: Pattern, right: Pattern) -> Pattern:
        """Other parts joined alike; itself where they are its own, so that plain patterns cost nothing."""
        return self if left is self.left and right is self.right else type(self)(left, right)

    def to_text(self) -> str:
        """`(left sign right)`."""
        return f"({self.left.to_text()} {self.sign} {self.right.to_text()})"


@dataclasses.dataclass(frozen=True)
class And(_Pair, named=False):
    """What both patterns allow."""

    sign: ClassVar[str] = "&"

    def distance_range(self) -> tuple[int, int] | None:
        """The distances in both ranges."""
        left, right = self.left.distance_range(), self.right.distance_range()
        if left is None or right is None:
            return left or right
        return max(left[0], right[0]), min(left[1], right[1])

    def step(self) -> int:
        """The least common multiple: a distance must be a multiple of both steps."""
        return math.lcm(self.left.step(), self.right.step())

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """left(i, j) and right(i, j)."""
        return self.left.allows(context, b, h, q_idx, kv_idx) & self.right.allows(
            context, b, h, q_idx, kv_idx
        )

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """The intersections."""
        return self.left.keys(context, start, stop) & self.right.keys(context, start, stop)


@dataclasses.dataclass(frozen=True)
class Or(_Pair, named=False):
    """What either pattern allows."""

    sign: ClassVar[str] = "|"

    def distance_range(self) -> tuple[int, int] | None:
        """From the least to the greatest of both ranges; None where one has no limit."""
        left, right = self.left.distance_range(), self.right.distance_range()
        return None if left is None or right is None else (min(left[0], right[0]), max(left[1], right[1]))

    def step(self) -> int:
        """The greatest common divisor of both steps."""
        return math.gcd(self.left.step(), self.right.step())

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """left(i, j) or right(i, j)."""
        return self.left.allows(context, b, h, q_idx, kv_idx) | self.right.allows(
            context, b, h, q_idx, kv_idx
        )

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """The unions."""
        return self.left.keys(context, start, stop) | self.right.keys(context, start, stop)


@dataclasses.dataclass(frozen=True)
class Without(_Pair, named=False):
    """What the left pattern allows and the right one does not."""

    sign: ClassVar[str] = "without"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """left(i, j) and not right(i, j)."""
        right = self.right.allows(context, b, h, q_idx, kv_idx)
        return self.left.allows(context, b, h, q_idx, kv_idx) & ~right

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Those of the left, but for those that all queries have on the right."""
        left, right = self.left.keys(context, start, stop), self.right.keys(context, start, stop)
        return Keys(tuple(subtract(left.some, right.full)), tuple(subtract(left.full, right.some)))
