"""Patterns of windows and steps: rules on the distance from a query i back to a key j.

    Window(before, after, dilation)    -after <= (i - j) / dilation <= before, in whole steps
    Strided(stride)                    (i - j) % stride == 0
    a subclass of ByDistance           -after <= i - j <= before and sees(i - j), (before, after) = ends()

Child et al. 2019 (Sparse Transformer), section 4.2 and figure 3b, combine the first two: one head sees the
last `stride` positions, `Window(stride, 0)`, another head every `stride`-th position, so that two steps reach
every position. The three integrations of section 4.3, for a decoder:

    PerLayer([Window(128, 0), Strided(128)])      layers alternate
    Window(128, 0) | Strided(128)                 merged: every head sees both parts
    PerHead([Window(128, 0), Strided(128)])       heads differ

With `recompute`, a stack recomputes its activations in the backward pass (section 5.4). A stride costs
n / stride keys per query, so a stride near sqrt(n) gives O(n sqrt(n)) in total.
"""

import bisect
import dataclasses
import functools
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Full, runs
from polyformer.attention.patterns.layout import Interval, Keys, Structure, clip, unite
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Window(Pattern):
    """Sliding window: a query sees itself, `before` keys before it and `after` after it, every `dilation`-th.

    The token itself is not counted: `Window(256)` sees 256 + 1 + 256 = 513 keys, `Window(255, 0)` is the
    causal window of 256, and `Window(0, 0)` sees only the token itself. With a dilation d the window reaches
    d times as far with the same number of keys.

    Raises `InputError` for negative widths, for `Window(0)` without an `after`, and for a dilation below 1.
    """

    before: NonNegativeInt
    after: NonNegativeInt | None = None  # by default equal to `before`
    dilation: PositiveInt = 1

    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after is None:
            if self.before == 0:
                raise InputError(
                    "Window: a window of 0 keys on both sides sees only the token itself; use 1 or more, "
                    "or Window(0, 0) if you want this"
                )
            object.__setattr__(self, "after", self.before)

    @property
    def keys_after(self) -> int:
        """The resolved value of `after`."""
        assert self.after is not None
        return self.after

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether -after <= (i - j) / dilation <= before, in whole steps."""
        # Positive for earlier keys.
        d = context.distance(q_idx, kv_idx)
        near = (d <= self.before * self.dilation) & (d >= -self.keys_after * self.dilation)
        return near if self.dilation == 1 else near & (d % self.dilation == 0)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return one interval; it needs no mask only if the dilation is 1."""
        # The slots of the first and the last query of the row.
        first, last = start + context.offset, stop - 1 + context.offset
        left, right = self.before * self.dilation, self.keys_after * self.dilation
        some = clip(first - left, last + right + 1, context.kv_len)
        full = clip(last - left, first + right + 1, context.kv_len) if self.dilation == 1 else ()
        return Keys(some, full)

    @property
    def structure(self) -> Structure:
        """The distances from -after * dilation to before * dilation."""
        return Structure.within(-self.keys_after * self.dilation, self.before * self.dilation, self.dilation)

    def in_residue_class(self, stride: int) -> Pattern | None:
        """Return the window over neighbours; None unless `stride` is a multiple of the dilation."""
        if stride % self.dilation:
            return None
        # The reach in slots divided by the distance of neighbours in a class.
        return Window(*(count * self.dilation // stride for count in (self.before, self.keys_after)))

    @classmethod
    def examples(cls) -> tuple["Window", ...]:
        return cls(3), cls(4, 0), cls(0, 2), cls(0, 0), cls(2, 1, dilation=3)


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """Strided pattern: a query sees itself and every `stride`-th key; on both sides unless it is causal.

    Raises `InputError` for a stride below 1.
    """

    stride: PositiveInt

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.2"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether (i - j) % stride == 0."""
        return context.distance(q_idx, kv_idx) % self.stride == 0

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return an interval as wide as the row at every stride, together all keys for wide rows."""
        width, length = stop - start, context.kv_len
        # The keys of `stride` neighbouring queries together are all keys.
        if width >= self.stride:
            everything = clip(0, length, length)
            return Keys(everything, everything if self.stride == 1 else ())
        # Query i sees the keys congruent to i; the row sees `width` neighbouring residues.
        first = (start + context.offset) % self.stride
        some = unite(
            (max(0, begin), min(begin + width, length))
            for begin in range(first - self.stride, length, self.stride)
        )
        return Keys(some, some if width == 1 else ())

    @property
    def structure(self) -> Structure:
        """Multiples of `stride`, at any distance."""
        return Structure(step=self.stride, by_distance=True)

    def in_residue_class(self, stride: int) -> Pattern | None:
        """Return full attention if all tokens of a class are multiples of the stride apart, else None."""
        return Full() if stride % self.stride == 0 else None

    @classmethod
    def examples(cls) -> tuple["Strided", ...]:
        return cls(3), cls(70)

    @classmethod
    def picture(cls) -> tuple["Strided", Context]:
        """Return every eighth key."""
        return cls(8), Context(48, 48)


MIN_GAP = 16
"""A gap of fewer keys costs less to compute and mask than another interval does."""


class ByDistance(Pattern, named=False):
    """A rule on the distance in slots from the query back to the key; negative for later keys.

    A subclass has two short methods, and is as fast as any other pattern:

    @dataclasses.dataclass(frozen=True)
    class Near(ByDistance):
        def ends(self): return 256, 0
        def sees(self, distance): return (distance < 4) | (distance % 8 == 0)
    """

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
