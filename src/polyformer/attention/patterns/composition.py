"""Patterns that are made of functions and of other patterns.

pattern                query i sees key j in head h of layer l if
MaskModPattern(f)      f(b, h, i, j), for any FlexAttention `mask_mod` f
A & B                  A and B allow the pair
A | B                  A or B allows it
Without(A, B)          A allows it and B does not
PerHead([A, B, ..])    the pattern at h, modulo their number, allows it
PerLayer([A, B, ..])   the pattern at l, modulo their number, allows it
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyformer.attention.patterns.base import MaskMod, Pattern, Where
from polyformer.attention.patterns.implied import Causal, Full
from polyformer.attention.patterns.layout import Keys, Structure, clip, subtract, unite
from polyformer.attention.patterns.mods import Mod, is_own
from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import union


@dataclasses.dataclass(frozen=True)
class MaskModPattern(Pattern, named=False):
    """Any FlexAttention `mask_mod`, from this library or a user; without a layout it may see every key.

    by_slot: queries of the function and of `where` count among all keys, so that a decoder with a cache gives
    the same result as one pass; otherwise from 0. A function that `broadcasts` always gets the queries of the
    call.
    """

    function: MaskMod
    where: Where | None = None
    by_slot: bool = True

    def is_static(self) -> bool:
        """Return False: a function may read values that change, and keep them alive."""
        return False

    def is_program(self) -> bool:
        """Return whether the function is bound and is known to depend on its indices only."""
        return isinstance(self.function, Mod) and self.function.program is not None and self.where is None

    def bind(self, by_slot: bool, device: torch.device) -> Pattern:
        """Run the function once on scalars, which shows whether its indices may broadcast."""
        if is_own(self.function):
            return self
        mod = Mod.of(self.function, "mask_mod", None, device)
        return dataclasses.replace(self, function=mod, by_slot=by_slot)

    def _first_query(self, context: Context) -> int:
        """Return the index of the first query in the function's numbering."""
        own = is_own(self.function) and not isinstance(self.function, Mod)
        return context.offset if self.by_slot and not own else 0

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys from `where`; without it every key."""
        if self.where is None:
            return super().keys(context, start, stop)
        start, stop = start + self._first_query(context), stop + self._first_query(context)
        if callable(self.where):
            keys = self.where(start, stop)
        else:
            # Several rows of the caller's layout may overlap this one.
            rows = [row.keys for row in self.where if row.start < stop and start < row.stop]
            keys = functools.reduce(lambda a, b: Keys((a | b).some, (a & b).full), rows) if rows else Keys(())
        inside = clip(0, context.kv_len, context.kv_len)
        return Keys(unite(keys.some), unite(keys.full)) & Keys(inside, inside)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the starts of the rows of the caller's layout."""
        if self.where is None or callable(self.where):
            return ()
        return tuple(row.start - self._first_query(context) for row in self.where)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return function(b, h, i, j)."""
        if not is_own(self.function):  # called outside of `attend`
            return self.bind(self.by_slot, q_idx.device).allows(context, b, h, q_idx, kv_idx)
        return self.function(b, h, q_idx + self._first_query(context), kv_idx)

    def to_text(self) -> str:
        """Raise `InputError`: a function has no expression."""
        raise InputError("pattern: a function (mask_mod) cannot be saved; write it as a Pattern class")


def as_pattern(pattern: Pattern | MaskMod | str, name: str = "pattern") -> Pattern:
    """Return the pattern of an expression or of a bare `mask_mod`; a pattern unchanged.

    Raises `InputError`, which calls the argument `name`.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, str):
        return _cached_from_text(pattern)
    if callable(pattern):
        return MaskModPattern(pattern)
    if hasattr(pattern, "mask_mod") and hasattr(pattern, "kv_num_blocks"):
        raise InputError(f"{name}: got a BlockMask; pass the function it was made of, block_mask.mask_mod")
    raise InputError(f"{name}: expected a Pattern, its text or a mask_mod function, got {quote(pattern)}")


_cached_from_text = functools.lru_cache(maxsize=256)(Pattern.from_text)
"""The pattern of an expression, cached: `attend` needs it in every call."""


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
        return self.left, self.right

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return type(self)(*parts)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return left(i, j) combined with right(i, j)."""
        return self.combine(*(part.allows(context, b, h, q_idx, kv_idx) for part in self.parts()))

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of both combined."""
        return self.combine(*(part.keys(context, start, stop) for part in self.parts()))

    def map_parts(self, function: Callable[[Pattern], Pattern]) -> Pattern:
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


@dataclasses.dataclass(frozen=True)
class _PatternCycle(CompositePattern):
    """Several patterns, used cyclically."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if isinstance(self.patterns, Pattern | str) or not all(
            isinstance(pattern, Pattern | str) for pattern in self.patterns
        ):
            kind = type(self).__name__
            raise InputError(
                f"{kind}: expected patterns or their texts in a list, got {quote(self.patterns)}"
            )
        if not self.patterns:
            raise InputError(f"{type(self).__name__}: expected 1 pattern or more, got none")
        object.__setattr__(self, "patterns", tuple(map(as_pattern, self.patterns)))

    def parts(self) -> tuple[Pattern, ...]:
        return self.patterns

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return type(self)(parts)

    def pattern_at(self, index: int) -> Pattern:
        """Return the pattern at `index`, cyclically."""
        return self.patterns[index % len(self.patterns)]


@dataclasses.dataclass(frozen=True)
class PerHead(_PatternCycle):
    """Patterns per head: head h has pattern h; with fewer patterns than heads they repeat."""

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.3"

    def head_pattern(self, head: int) -> Pattern:
        """Return patterns[head % number of patterns]."""
        return self.pattern_at(head).head_pattern(head)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return patterns[h % number of patterns](i, j)."""
        allowed = self.patterns[0].allows(context, b, h, q_idx, kv_idx)
        for index, pattern in enumerate(self.patterns[1:], 1):
            # Head h has pattern h, modulo their number.
            of_this_pattern = h % len(self.patterns) == index
            allowed = torch.where(of_this_pattern, pattern.allows(context, b, h, q_idx, kv_idx), allowed)
        return allowed

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys that some head needs, and the keys that all heads see without a mask."""
        per_pattern = [pattern.keys(context, start, stop) for pattern in self.patterns]
        combined = per_pattern[0]
        for keys in per_pattern[1:]:
            # One layout for all heads: keys that any head needs, and keys that no head masks.
            combined = Keys((combined | keys).some, (combined & keys).full)
        return combined

    @property
    def structure(self) -> Structure:
        """The keys that any head may read."""
        return Structure(reach=union([pattern.structure.reach for pattern in self.patterns]))

    @classmethod
    def examples(cls) -> tuple["PerHead", ...]:
        return (cls((Causal(), Full())),)


@dataclasses.dataclass(frozen=True)
class PerLayer(_PatternCycle):
    """Patterns per layer: layer l has pattern l; with fewer patterns than layers they repeat."""

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.3"

    def layer_pattern(self, layer: int) -> Pattern:
        """Return patterns[layer % number of patterns]."""
        return self.pattern_at(layer).layer_pattern(layer)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the rule of the first pattern: outside a stack there is a single layer."""
        return self.pattern_at(0).allows(context, b, h, q_idx, kv_idx)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of the first pattern, as `allows` does."""
        return self.pattern_at(0).keys(context, start, stop)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the cuts of the first pattern, as `allows` does."""
        return self.pattern_at(0).cuts(context)

    @property
    def structure(self) -> Structure:
        """That of the first pattern, as `allows` uses it."""
        return self.pattern_at(0).structure

    @classmethod
    def examples(cls) -> tuple["PerLayer", ...]:
        return (cls((Causal(), Full())),)
