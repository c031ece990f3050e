"""Patterns that differ per head or per layer."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.composition import CompositePattern
from polyformer.attention.patterns.implied import Causal, Full
from polyformer.attention.patterns.layout import Keys
from polyformer.attention.patterns.structure import Structure
from polyformer.attention.patterns.user_defined import as_pattern
from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import union


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
        """Return all patterns."""
        return self.patterns

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        """Return the same choice among other patterns."""
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
