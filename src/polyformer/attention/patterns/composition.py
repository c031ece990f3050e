"""Composed patterns: `&` (intersection), `|` (union) and `Without` (difference)."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyformer.attention.patterns.base import MaskMod, Pattern
from polyformer.attention.patterns.block_needs import BlockNeeds
from polyformer.attention.patterns.layout import Keys, subtract
from polyformer.attention.patterns.user_defined import as_pattern
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach, union


def simple_parts(pattern: Pattern) -> list[Pattern]:
    """Return the patterns that a pattern is composed of by `&`, `|` and `Without`, in their order."""
    parts: list[Pattern] = []
    pattern.map_parts(lambda part: parts.append(part) or part)
    return parts


class CompositePattern(Pattern, named=False):
    """Base of the patterns that are composed of others, their parts."""

    def parts(self) -> tuple[Pattern, ...]:
        """Return the patterns that this one is composed of."""
        raise NotImplementedError

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        """Return the same composition of other parts."""
        raise NotImplementedError

    def convert(self, function: Callable[[Pattern], Pattern]) -> Pattern:
        """Return the composition of the converted parts."""
        old = self.parts()
        new = tuple(map(function, old))
        # Most patterns are the same in all layers and heads: `self` keeps its cached plans.
        return self if all(a is b for a, b in zip(old, new)) else self.with_parts(new)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the cuts of all parts."""
        return tuple(cut for part in self.parts() for cut in part.cuts(context))

    def is_static(self) -> bool:
        """Return whether all parts are."""
        return all(part.is_static() for part in self.parts())

    def causal(self) -> bool:
        """Return whether all parts are."""
        return all(part.causal() for part in self.parts())

    def bind(self, by_slot: bool, device: torch.device) -> Pattern:
        """Return all parts bound."""
        return self.convert(lambda part: part.bind(by_slot, device))

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the composition of the parts with their tables."""
        return self.convert(lambda part: part.with_tables(context, device))

    def layer_pattern(self, layer: int) -> Pattern:
        """Return the composition of the parts' patterns of this layer."""
        return self.convert(lambda part: part.layer_pattern(layer))

    def head_pattern(self, head: int) -> Pattern:
        """Return the composition of the parts' patterns of this head."""
        return self.convert(lambda part: part.head_pattern(head))


@dataclasses.dataclass(frozen=True)
class _BinaryPattern(CompositePattern):
    """Two composed patterns; `combine` is the operation on their masks and on their keys."""

    left: Pattern
    right: Pattern

    sign: ClassVar[str] = ""
    combine: ClassVar[Callable[[Any, Any], Any]]

    def __init_subclass__(cls, named: bool = True, **options: object) -> None:
        super().__init_subclass__(named, **options)
        # `Pattern.__and__` and `__or__` find the class here, without a circular import.
        Pattern.operators[cls.sign] = cls.of

    @classmethod
    def of(cls, left: Pattern | MaskMod | str, right: Pattern | MaskMod | str) -> Self:
        """Compose both; an expression or a bare `mask_mod` is converted to a pattern."""
        return cls(as_pattern(left), as_pattern(right))

    def parts(self) -> tuple[Pattern, ...]:
        """Return both patterns."""
        return self.left, self.right

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        """Return the same operation on other patterns."""
        return type(self)(*parts)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return left(i, j) combined with right(i, j)."""
        return self.combine(*(part.allows(context, b, h, q_idx, kv_idx) for part in self.parts()))

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of both combined."""
        return self.combine(*(part.keys(context, start, stop) for part in self.parts()))

    def relative(self, context: Context) -> bool:
        """Return whether both parts are."""
        return self.left.relative(context) and self.right.relative(context)

    def map_parts(self, function: Callable[[Pattern], Pattern]) -> Pattern:
        """Return both with `function` applied."""
        return self.convert(lambda part: part.map_parts(function))

    def to_text(self) -> str:
        """Return `(left sign right)`."""
        return f"({self.left.to_text()} {self.sign} {self.right.to_text()})"


@dataclasses.dataclass(frozen=True)
class And(_BinaryPattern, named=False):
    """The intersection: pairs that both patterns allow."""

    sign: ClassVar[str] = "&"
    combine: ClassVar[Callable[[Any, Any], Any]] = operator.and_

    def distance_range(self) -> tuple[int, int] | None:
        """Return the intersection of both ranges."""
        left, right = self.left.distance_range(), self.right.distance_range()
        if left is None or right is None:
            return left or right
        # Both limits apply to every visible pair.
        return max(left[0], right[0]), min(left[1], right[1])

    def reach(self) -> Reach | None:
        """Return the shorter reach of both parts."""
        left, right = self.left.reach(), self.right.reach()
        return left or right if left is None or right is None else left & right

    def block_needs(self) -> BlockNeeds | None:
        """Return the needs of one part, which include the intersection."""
        return self.left.block_needs() or self.right.block_needs()

    def step(self) -> int:
        """Return the least common multiple: a distance must be a multiple of both steps."""
        return math.lcm(self.left.step(), self.right.step())


@dataclasses.dataclass(frozen=True)
class Or(_BinaryPattern, named=False):
    """The union: pairs that either pattern allows."""

    sign: ClassVar[str] = "|"
    combine: ClassVar[Callable[[Any, Any], Any]] = operator.or_

    def distance_range(self) -> tuple[int, int] | None:
        """Return the range from the least to the greatest of both; None if either has no limit."""
        left, right = self.left.distance_range(), self.right.distance_range()
        # An unlimited part makes the union unlimited.
        return None if left is None or right is None else (min(left[0], right[0]), max(left[1], right[1]))

    def reach(self) -> Reach | None:
        """Return the keys that either part may read."""
        return union([self.left.reach(), self.right.reach()])

    def block_needs(self) -> BlockNeeds | None:
        """Return the needs of both parts; None if either has no rule."""
        left, right = self.left.block_needs(), self.right.block_needs()
        return None if left is None or right is None else left | right

    def step(self) -> int:
        """Return the greatest common divisor of both steps."""
        return math.gcd(self.left.step(), self.right.step())


@dataclasses.dataclass(frozen=True)
class Without(_BinaryPattern, named=False):
    """The difference: pairs that the left pattern allows and the right pattern does not."""

    sign: ClassVar[str] = "without"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether left(i, j) and not right(i, j)."""
        right = self.right.allows(context, b, h, q_idx, kv_idx)
        return self.left.allows(context, b, h, q_idx, kv_idx) & ~right

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of the left, except keys that all queries see on the right."""
        left, right = self.left.keys(context, start, stop), self.right.keys(context, start, stop)
        # Only `full` keys on the right are hidden from all queries; any `some` key may be hidden from one.
        return Keys(tuple(subtract(left.some, right.full)), tuple(subtract(left.full, right.some)))

    def reach(self) -> Reach | None:
        """Return the reach of the left pattern."""
        return self.left.reach()

    def block_needs(self) -> BlockNeeds | None:
        """Return the needs of the left pattern."""
        return self.left.block_needs()
