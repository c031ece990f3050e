"""Patterns for a part of a call: a run of its queries and a run of its keys, indexed from 0."""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Documents, Padding
from polyformer.attention.patterns.layout import Keys, intersect
from polyformer.attention.patterns.structure import Structure
from polyformer.core.sequence.context import Context


def pattern_in_part(pattern: Pattern, whole: Context, query: int, key: int) -> Pattern:
    """Return `pattern` for a part of the call `whole` that begins at query `query` and key `key`.

    Patterns that depend on distances only, or that read everything from the part's context, stay unchanged.
    All others are evaluated on the queries and keys of `whole`.
    """

    def in_part(part: Pattern) -> Pattern:
        # Documents and padding read tables, and the context of the part has its section of them.
        own = part.structure.by_distance or isinstance(part, (Documents, Padding))
        return part if own else InPart(part, whole, query, key)

    return pattern.map_parts(in_part)


@dataclasses.dataclass(frozen=True)
class InPart(Pattern, named=False):
    """A pattern for a part of a call, evaluated on the slots of the whole call."""

    pattern: Pattern
    whole: Context
    query: int
    key: int

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return pattern(i + query, j + key), evaluated in the whole call."""
        # Indices of the part become indices of the whole call.
        return self.pattern.allows(self.whole, b, h, q_idx + self.query, kv_idx + self.key)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of the pattern in the whole call, clipped to the part."""
        keys = self.pattern.keys(self.whole, start + self.query, stop + self.query)
        # Back to indices of the part; keys outside of it belong to other parts.
        some, full = (
            intersect(((a - self.key, b - self.key) for a, b in runs), ((0, context.kv_len),))
            for runs in (keys.some, keys.full)
        )
        return Keys(some, full)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the cuts of the pattern in the whole call, moved to the queries of the part."""
        return tuple(cut - self.query for cut in self.pattern.cuts(self.whole))

    @property
    def structure(self) -> Structure:
        """That of the pattern: distances are the same in a part, while the rule reads the whole call."""
        return dataclasses.replace(self.pattern.structure, by_distance=False)

    def is_static(self) -> bool:
        """Return False: the context `whole` belongs to a single call."""
        return False

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the pattern with its tables of the whole call."""
        return dataclasses.replace(self, pattern=self.pattern.with_tables(self.whole, device))

    def head_pattern(self, head: int) -> Pattern:
        """Return the pattern of this head, for the same part."""
        return pattern_in_part(self.pattern.head_pattern(head), self.whole, self.query, self.key)
