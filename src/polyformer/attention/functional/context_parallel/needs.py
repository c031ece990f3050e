"""The keys that the queries of each process need, from the layout of the pattern, known to every process."""

import dataclasses
import itertools
from collections.abc import Iterable

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import implied
from polyformer.attention.patterns.layout import Interval, clip, count, intersect, unite
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.sequence_shards import Run, SequenceShard, balanced, contiguous

UNEVEN = 1.25
"""Largest ratio of the work of the busiest process to the average at which each process has a single run."""

PROBES = 8
"""Number of runs of queries per process in the estimate of its work."""

FEW = 4
"""Largest number of runs of keys with separate calls; more runs are merged, with zeros in the gaps."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of queries and the runs of keys that they may see, in slots of the whole sequence."""

    queries: Run
    keys: tuple[Interval, ...]

    def spans(self) -> tuple[Interval, ...]:
        """Return the runs of keys for separate calls: `keys`, or a single run from first to last if many."""
        return self.keys if len(self.keys) <= FEW else ((self.keys[0][0], self.keys[-1][1]),)


@dataclasses.dataclass(frozen=True)
class Needs:
    """The keys that the processes of a shard need from each other for a call.

    parts: the runs of queries of each process. keys: all keys that the queries of each process may see.
    """

    shard: SequenceShard = dataclasses.field(repr=False)
    parts: tuple[tuple[Part, ...], ...]
    keys: tuple[tuple[Interval, ...], ...]

    def sent(self, sender: int, receiver: int) -> tuple[Interval, ...]:
        """Return the slots of the keys that `sender` sends to `receiver`, in ascending order."""
        if sender == receiver:
            return ()
        # The keys that the receiver needs and the sender has.
        return intersect(self.keys[receiver], unite(self.shard.key_runs[sender]))

    def part_needed(self) -> float:
        """Return the fraction of the keys of other processes that the queries of the processes need."""
        processes = len(self.keys)
        every = (processes - 1) * sum(stop - start for runs in self.shard.key_runs for start, stop in runs)
        return sum(map(self.received, range(processes))) / max(every, 1)

    def received(self, rank: int) -> int:
        """Return the number of keys that a process receives from all others."""
        return sum(count(self.sent(sender, rank)) for sender in range(len(self.keys)))


def choose_runs(
    patterns: Iterable[Pattern | None], whole: Context, processes: int
) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of slots of every process, for layers with these patterns.

    Each process has a single run if this balances the work of all layers, for example with windows: then only
    the edges of a run need keys of other processes. Otherwise each process has an early run and a late run,
    which together balance the work.
    """
    limits, busiest = implied(whole), 1.0
    for pattern in patterns:
        both = limits if pattern is None or limits is None else pattern & limits
        busiest = max(busiest, imbalance(both or pattern, whole, processes))
    return (balanced if busiest > UNEVEN else contiguous)(whole.q_len, processes)


def imbalance(pattern: Pattern | None, whole: Context, processes: int) -> float:
    """Return the work of the busiest process divided by the average if each process has a single run."""
    work = []
    for part in contiguous(whole.q_len, processes):
        # A few rows are enough to estimate the work.
        step = -(-(part[0][1] - part[0][0]) // PROBES) or 1
        edges = sorted({*range(*part[0], step), *_cuts(pattern, whole, part[0]), part[0][1]})
        keys = [_keys(pattern, whole, a, b) for a, b in itertools.pairwise(edges)]
        # Queries times keys, summed over the rows.
        work.append(sum((b - a) * count(own) for (a, b), own in zip(itertools.pairwise(edges), keys)))
    return max(work) * processes / max(sum(work), 1)


def _cuts(pattern: Pattern | None, whole: Context, run: Run) -> list[int]:
    """Return the cuts of the pattern inside a run."""
    return [] if pattern is None else [edge for edge in pattern.cuts(whole) if run[0] < edge < run[1]]


def _keys(pattern: Pattern | None, whole: Context, start: int, stop: int) -> tuple[Interval, ...]:
    """Return the keys that these queries may see."""
    return clip(0, whole.kv_len, whole.kv_len) if pattern is None else pattern.keys(whole, start, stop).some


def find_needs(pattern: Pattern | None, whole: Context, shard: SequenceShard, every: bool = False) -> Needs:
    """Return the needs of a call of `pattern`, which includes the limits of the context.

    every: all processes need all keys.
    """
    pattern = None if every else pattern

    def keys_of(start: int, stop: int) -> tuple[Interval, ...]:
        edges = sorted({start, stop, *_cuts(pattern, whole, (start, stop))})
        return unite(run for a, b in itertools.pairwise(edges) for run in _keys(pattern, whole, a, b))

    parts = tuple(
        tuple(Part((start, stop), keys_of(start, stop)) for start, stop in runs if start < stop)
        for runs in shard.runs
    )
    return Needs(shard, parts, tuple(unite(run for part in of for run in part.keys) for of in parts))
