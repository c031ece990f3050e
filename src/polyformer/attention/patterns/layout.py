"""What a pattern states besides its rule: the keys that its queries need.

FlexAttention lacks a cheap description of these keys. A `Layout` lists them as intervals, for each run of
queries of a call. Everything in it is Python integers. A layout of n queries has O(n / block) rows of a few
intervals each, so no n x n structure is ever built.

A `Structure` is what follows from the rule for any call. Caches ask for its `reach`, position schemes for its
`distances`, tiles for `by_distance`, and splits for its `step`. A graph for texts of any length cannot have a
layout, and needs `blocks` instead.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

from torch import Tensor

from polyformer.core.sequence.tokens import Reach, union

Interval = tuple[int, int]
"""Key slots start <= j < stop."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that a run of queries may see, over all batch rows and heads.

    `some` contains every key that at least one of the queries may see (and possibly more). `full` contains
    only keys that all of them may see, so that no mask is needed there (and possibly fewer).
    """

    some: tuple[Interval, ...]
    full: tuple[Interval, ...] = ()

    @classmethod
    def of_spans(cls, first: Tensor, last: Tensor, length: int) -> "Keys":
        """Return the keys of queries that see the slots first <= j < last, [B, Tq] each, below `length`."""
        some = clip(int(first.min()), int(last.max()), length)
        # Empty if two of the queries have no slot in common.
        return cls(some, clip(int(first.max()), int(last.min()), length))

    def __and__(self, other: "Keys") -> "Keys":
        return Keys(intersect(self.some, other.some), intersect(self.full, other.full))

    def __or__(self, other: "Keys") -> "Keys":
        return Keys(unite((*self.some, *other.some)), unite((*self.full, *other.full)))


@dataclasses.dataclass(frozen=True)
class Row:
    """The queries start <= i < stop and the keys they need."""

    start: int
    stop: int
    keys: Keys


Layout = tuple[Row, ...]
"""Rows that cover every query once, in order."""


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the intervals common to two sorted, disjoint lists."""
    left, right = list(a), list(b)
    common, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        # The interval that ends first cannot overlap anything else.
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def unite(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return sorted, disjoint intervals that cover the same keys; touching intervals are merged."""
    united: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        # Overlapping or touching intervals become one.
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(stop, united[-1][1]))
        else:
            united.append((start, stop))
    return tuple(united)


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the parts of the sorted, disjoint intervals `a` outside the sorted, disjoint intervals `b`."""
    holes, left, passed = list(b), [], 0
    for start, stop in a:
        # Holes before this interval are also before all later intervals.
        while passed < len(holes) and holes[passed][1] <= start:
            passed += 1
        for first, last in itertools.islice(holes, passed, None):
            if first >= stop:
                break
            if start < first:
                left.append((start, first))
            # Continue behind the hole.
            start = last
        if start < stop:
            left.append((start, stop))
    return tuple(left)


def clip(start: int, stop: int, length: int) -> tuple[Interval, ...]:
    """Return the part of start..stop inside 0..length, as intervals."""
    start, stop = max(start, 0), min(stop, length)
    return ((start, stop),) if start < stop else ()


def count(intervals: Iterable[Interval]) -> int:
    """Return the number of keys in the intervals."""
    return sum(stop - start for start, stop in intervals)


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
