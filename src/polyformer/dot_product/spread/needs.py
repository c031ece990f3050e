"""Which keys the queries of each process need, from the pattern's layout: every process knows it of all."""

import dataclasses
import itertools
from collections.abc import Iterable

from polyformer.patterns.base import Pattern
from polyformer.patterns.implied import implied
from polyformer.patterns.layout import Interval, clip, count, intersect, unite
from polyformer.sequence.context import Context
from polyformer.sequence.shares import Run, Share, balanced, contiguous

UNEVEN = 1.25
"""How many times the average a process may have to compute before its slots are in two runs."""

PROBES = 8
"""Runs of queries of each process that are asked for their keys, to find how much it has to compute."""

FEW = 4
"""Runs of keys that a run of queries meets in calls of their own; more are one run, with gaps of zeros."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of queries and the runs of keys that they may see, in slots of the whole sequence."""

    queries: Run
    keys: tuple[Interval, ...]

    def spans(self) -> tuple[Interval, ...]:
        """The runs of keys to compute with: `keys`, or what lies between the first and the last where they
        are many."""
        return self.keys if len(self.keys) <= FEW else ((self.keys[0][0], self.keys[-1][1]),)


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the processes of a share need of one another for one call.

    parts: of each process, its runs of queries. keys: of each process, all keys that its queries may see.
    """

    share: Share = dataclasses.field(repr=False)
    parts: tuple[tuple[Part, ...], ...]
    keys: tuple[tuple[Interval, ...], ...]

    def sent(self, sender: int, receiver: int) -> tuple[Interval, ...]:
        """The slots whose keys one process sends to another, in rising order."""
        if sender == receiver:
            return ()
        return intersect(self.keys[receiver], unite(self.share.key_runs[sender]))

    def part_needed(self) -> float:
        """Of the keys that processes do not hold themselves, the part that their queries need."""
        processes = len(self.keys)
        every = (processes - 1) * sum(stop - start for runs in self.share.key_runs for start, stop in runs)
        return sum(map(self.received, range(processes))) / max(every, 1)

    def received(self, rank: int) -> int:
        """How many keys a process gets from all others."""
        return sum(count(self.sent(sender, rank)) for sender in range(len(self.keys)))


def choose_runs(
    patterns: Iterable[Pattern | None], whole: Context, processes: int
) -> tuple[tuple[Run, ...], ...]:
    """The runs of slots of every process, for layers with these patterns.

    One run each where that shares out the work of all layers evenly, as windows do, for the keys of others
    are then at its edges alone; else an early and a late one, which balance it.
    """
    limits, busiest = implied(whole), 1.0
    for pattern in patterns:
        both = limits if pattern is None or limits is None else pattern & limits
        busiest = max(busiest, imbalance(both or pattern, whole, processes))
    return (balanced if busiest > UNEVEN else contiguous)(whole.q_len, processes)


def imbalance(pattern: Pattern | None, whole: Context, processes: int) -> float:
    """How many times the average the busiest process would compute, if each had one run of the slots."""
    work = []
    for part in contiguous(whole.q_len, processes):
        step = -(-(part[0][1] - part[0][0]) // PROBES) or 1
        edges = sorted({*range(*part[0], step), *_cuts(pattern, whole, part[0]), part[0][1]})
        keys = [_keys(pattern, whole, a, b) for a, b in itertools.pairwise(edges)]
        work.append(sum((b - a) * count(own) for (a, b), own in zip(itertools.pairwise(edges), keys)))
    return max(work) * processes / max(sum(work), 1)


def _cuts(pattern: Pattern | None, whole: Context, run: Run) -> list[int]:
    """Inside a run."""
    return [] if pattern is None else [edge for edge in pattern.cuts(whole) if run[0] < edge < run[1]]


def _keys(pattern: Pattern | None, whole: Context, start: int, stop: int) -> tuple[Interval, ...]:
    """That these queries may see."""
    return clip(0, whole.kv_len, whole.kv_len) if pattern is None else pattern.keys(whole, start, stop).some


def find_needs(pattern: Pattern | None, whole: Context, share: Share, every: bool = False) -> Needs:
    """The needs of a call of `pattern`, with all that the context forbids in it. every: all need all keys."""
    pattern = None if every else pattern

    def keys_of(start: int, stop: int) -> tuple[Interval, ...]:
        edges = sorted({start, stop, *_cuts(pattern, whole, (start, stop))})
        return unite(run for a, b in itertools.pairwise(edges) for run in _keys(pattern, whole, a, b))

    parts = tuple(
        tuple(Part((start, stop), keys_of(start, stop)) for start, stop in runs if start < stop)
        for runs in share.runs
    )
    return Needs(share, parts, tuple(unite(run for part in of for run in part.keys) for of in parts))
