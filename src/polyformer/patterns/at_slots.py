"""Patterns in a part of a call: a run of its queries and a run of its keys, with indices of their own."""

import dataclasses

from torch import Tensor

from polyformer.patterns.base import Pattern
from polyformer.patterns.implied import Documents, Padding
from polyformer.patterns.layout import Keys, intersect
from polyformer.sequence.context import Context


def at_slots(pattern: Pattern, whole: Context, query: int, key: int) -> Pattern:
    """`pattern` where query 0 is query `query`, and key 0 is key `key`, of the context `whole`.

    What depends on distances alone, or asks the part's context for what it has of the part, stays what it is.
    Everything else is asked about the queries and keys of `whole`.
    """

    def moved(part: Pattern) -> Pattern:
        own = part.relative(whole) or isinstance(part, (Documents, Padding))
        return part if own else AtSlots(part, whole, query, key)

    return pattern.mapped(moved)


@dataclasses.dataclass(frozen=True)
class AtSlots(Pattern, named=False):
    """A pattern as a part of the call meets it, by asking it about the whole call."""

    pattern: Pattern
    whole: Context
    query: int
    key: int

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """pattern(i + query, j + key) in the whole call."""
        return self.pattern.allows(self.whole, b, h, q_idx + self.query, kv_idx + self.key)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Those of the whole call, as far as they are in the part."""
        keys = self.pattern.keys(self.whole, start + self.query, stop + self.query)
        some, full = (
            intersect(((a - self.key, b - self.key) for a, b in runs), ((0, context.kv_len),))
            for runs in (keys.some, keys.full)
        )
        return Keys(some, full)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Those of the whole call."""
        return tuple(cut - self.query for cut in self.pattern.cuts(self.whole))

    def distance_range(self) -> tuple[int, int] | None:
        """The pattern's: distances are the same in a part."""
        return self.pattern.distance_range()

    def is_static(self) -> bool:
        """No: the context it asks is that of one call."""
        return False

    def step(self) -> int:
        """The pattern's: slots as far apart in the whole call are as far apart in a part."""
        return self.pattern.step()

    def head_pattern(self, head: int) -> Pattern:
        """The pattern's for this head, in the part."""
        return at_slots(self.pattern.head_pattern(head), self.whole, self.query, self.key)
