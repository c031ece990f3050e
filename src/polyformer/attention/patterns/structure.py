"""The structure of a pattern: what follows from its rule for any call, besides the rule itself.

A pattern states one `Structure`. Caches ask for its `reach`, position schemes for its `distances`, tiles for
`by_distance`, and splits for its `step`. A layout lists the keys of each run of queries of a given length; a
graph for any length needs `blocks` instead.
"""

import dataclasses
import math
from collections.abc import Callable

from polyformer.core.sequence.reach import Reach, union

MOST = 256
"""The largest block of a rule that combines blocks of several sizes."""


Links = Callable[[int], list[tuple[int, ...]]]
"""The key blocks of each of a number of query blocks."""


@dataclasses.dataclass(frozen=True)
class BlockNeeds:
    """The keys that queries may see; a superset is correct. Tokens are counted without padding.

    Args:
        size: blocks are tokens i * size .. (i + 1) * size - 1, or any multiple of it.
        before, after: a block sees as many tokens before its first and after its last.
        first, last: numbers of tokens at both ends of a text that see all and are seen by all.
        links: other blocks of `size` tokens that a block sees; None for none.
        whole: texts of at most as many tokens see themselves whole.
    """

    size: int = 1
    before: int = 0
    after: int = 0
    first: int = 0
    last: int = 0
    links: Links | None = None
    whole: int = 0

    def __or__(self, other: "BlockNeeds") -> "BlockNeeds | None":
        """Return the needs of both; None if blocks of both sizes do not fit together."""
        size = math.lcm(self.size, other.size)
        links = [needs.links for needs in (self, other) if needs.links is not None]
        if size > MOST or any(needs.links is not None and needs.size != size for needs in (self, other)):
            return None
        return BlockNeeds(
            size,
            max(self.before, other.before),
            max(self.after, other.after),
            max(self.first, other.first),
            max(self.last, other.last),
            links[0] if len(links) == 1 else _joined(links) if links else None,
            max(self.whole, other.whole),
        )

    @property
    def by_position(self) -> bool:
        """Return whether the keys depend on positions in the text, not only on distances."""
        return self.size > 1 or bool(self.first or self.last or self.whole)


def _joined(links: list[Links]) -> Links:
    def both(count: int) -> list[tuple[int, ...]]:
        return [tuple(sorted({*a, *b})) for a, b in zip(*(part(count) for part in links))]

    return both


Range = tuple[int, int]
"""The least and the greatest of some distances."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """What every pair of a query and a key that it sees has in common; a superset is correct.

    Args:
        distances: the least and the greatest distance of a pair; None for no limit.
        step: a query sees only keys at multiples of this many slots; 1 for no such limit.
        by_distance: whether the rule depends on `q_idx - kv_idx` only, so that one mask serves a diagonal.
        reach: the earlier keys that a query may read, as a decoder drops the others; None for all keys.
        blocks: the keys that blocks of queries need in a text of any length; None if there is no rule.
    """

    distances: Range | None = None
    step: int = 1
    by_distance: bool = False
    reach: Reach | None = None
    blocks: BlockNeeds | None = None

    @classmethod
    def within(cls, least: int, greatest: int, step: int = 1) -> "Structure":
        """Return the structure of a rule on the distances from `least` to `greatest`."""
        before, after = max(0, greatest), max(0, -least)
        return cls((least, greatest), step, True, Reach(before), BlockNeeds(before=before, after=after))

    def __and__(self, other: "Structure") -> "Structure":
        """Return the structure of pairs that two rules allow: the limits of both hold."""
        return Structure(
            _intersection(self.distances, other.distances),
            math.lcm(self.step, other.step),
            self.by_distance and other.by_distance,
            self.reach & other.reach if self.reach and other.reach else self.reach or other.reach,
            self.blocks or other.blocks,  # the needs of either include the intersection
        )

    def __or__(self, other: "Structure") -> "Structure":
        """Return the structure of pairs that either rule allows: only limits of both hold."""
        return Structure(
            _hull(self.distances, other.distances),
            math.gcd(self.step, other.step),
            self.by_distance and other.by_distance,
            union([self.reach, other.reach]),
            None if self.blocks is None or other.blocks is None else self.blocks | other.blocks,
        )

    def without(self, other: "Structure") -> "Structure":
        """Return the structure of pairs that this rule allows and the other does not."""
        return dataclasses.replace(self, by_distance=self.by_distance and other.by_distance)


def _intersection(a: Range | None, b: Range | None) -> Range | None:
    if a is None or b is None:
        return a or b
    return max(a[0], b[0]), min(a[1], b[1])


def _hull(a: Range | None, b: Range | None) -> Range | None:
    # A part without a limit makes the union unlimited.
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))
