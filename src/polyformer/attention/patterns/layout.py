"""Layouts: the keys that a run of queries needs, as intervals, which FlexAttention lacks.

Everything here is Python integers. A layout of n queries has O(n / block) rows of a few intervals each, so no
n x n structure is ever built.
"""

import dataclasses
import itertools
from collections.abc import Iterable

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
