"""Composed patterns: `&` (intersection), `|` (union) and `Without` (difference)."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyformer.attention.patterns.base import MaskMod, Pattern
from polyformer.attention.patterns.layout import Keys, subtract
from polyformer.attention.patterns.structure import Structure
from polyformer.attention.patterns.user_defined import as_pattern
from polyformer.core.sequence.context import Context


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

    @property
    def structure(self) -> Structure:
        """The limits of both parts."""
        return self.left.structure & self.right.structure


@dataclasses.dataclass(frozen=True)
class Or(_BinaryPattern, named=False):
    """The union: pairs that either pattern allows."""

    sign: ClassVar[str] = "|"
    combine: ClassVar[Callable[[Any, Any], Any]] = operator.or_

    @property
    def structure(self) -> Structure:
        """The limits that both parts have."""
        return self.left.structure | self.right.structure


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

    @property
    def structure(self) -> Structure:
        """The limits of the left part."""
        return self.left.structure.without(self.right.structure)
