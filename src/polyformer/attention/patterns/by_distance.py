"""Patterns that depend on distances only, defined by two short methods and as fast as any other pattern.

@dataclasses.dataclass(frozen=True)
class Near(ByDistance):
    def ends(self): return 256, 0
    def sees(self, distance): return (distance < 4) | (distance % 8 == 0)
"""

import bisect
import functools
import math

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import runs
from polyformer.attention.patterns.layout import Interval, Keys, unite
from polyformer.attention.patterns.structure import Structure
from polyformer.core.sequence.context import Context

MIN_GAP = 16
"""A gap of fewer keys costs less to compute and mask than another interval does."""


class ByDistance(Pattern, named=False):
    """A rule on the distance in slots from the query back to the key; negative for later keys."""

    def ends(self) -> tuple[int, int]:
        """Return the farthest distances seen, before and after the query: for example (256, 0)."""
        raise NotImplementedError

    def sees(self, distance: Tensor) -> Tensor:
        """Return whether a key at these distances is seen; called only for distances between the ends."""
        raise NotImplementedError

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether -after <= i - j <= before and sees(i - j), with (before, after) = ends()."""
        distance, (before, after) = context.distance(q_idx, kv_idx), self.ends()
        return (distance <= before) & (distance >= -after) & self.sees(distance)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the runs of visible distances, moved to the queries' slots: O(number of runs)."""
        first, near = start + context.offset, _keys_around(self, stop - start)
        return Keys(_shifted(near.some, first, context.kv_len), _shifted(near.full, first, context.kv_len))

    @property
    def structure(self) -> Structure:
        """The distances between the ends, in steps of the greatest common divisor of all distances seen."""
        before, after = self.ends()
        return Structure.within(-after, before, _step(self))


def _step(pattern: ByDistance) -> int:
    """Return the greatest common divisor of all distances seen."""
    runs_seen = _runs_seen(pattern)
    # Two neighbouring distances have no common divisor but 1.
    if any(last > first for first, last in runs_seen):
        return 1
    return math.gcd(*(first for first, _ in runs_seen)) or 1


@functools.lru_cache(maxsize=256)
def _runs_seen(pattern: ByDistance) -> tuple[tuple[int, int], ...]:
    """Return the runs of visible distances, each as (least, greatest), beginning with the farthest key."""
    before, after = pattern.ends()
    # From the farthest earlier key to the farthest later key: keys in ascending order.
    distance = torch.arange(
        before, -after - 1, -1, device="cpu"
    )  # also if a model is built on the meta device
    seen = pattern.sees(distance).expand(len(distance))
    return tuple((before - stop + 1, before - start) for start, stop in runs(seen))


@functools.lru_cache(maxsize=1024)
def _keys_around(pattern: ByDistance, width: int) -> Keys:
    """Return the keys of `width` consecutive queries as distances in slots after the first query."""
    # Query i sees keys i - greatest .. i - least. Over i = 0 .. width - 1 their union is `some`, their
    # intersection `full`.
    some = unite((-greatest, width - least) for least, greatest in _runs_seen(pattern))
    full = unite((width - 1 - greatest, 1 - least) for least, greatest in _runs_seen(pattern))
    merged = _without_narrow_gaps(some)
    if merged != some:  # a narrow run inside a joined interval is masked like the gaps around it
        unmerged = set(merged)
        full = tuple(run for run in full if run[1] - run[0] >= MIN_GAP or run in unmerged)
    return Keys(merged, full)


def _without_narrow_gaps(intervals: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Return the sorted intervals, with intervals joined if the gap is narrower than `MIN_GAP` keys."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and start - joined[-1][1] < MIN_GAP:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _shifted(intervals: tuple[Interval, ...], by: int, length: int) -> tuple[Interval, ...]:
    """Return the sorted intervals moved by `by` slots and clipped to 0..length."""
    # Move only the intervals that overlap 0..length.
    first = bisect.bisect_right(intervals, -by, key=lambda interval: interval[1])
    last = bisect.bisect_left(intervals, length - by, key=lambda interval: interval[0])
    return tuple((max(0, start + by), min(stop + by, length)) for start, stop in intervals[first:last])
