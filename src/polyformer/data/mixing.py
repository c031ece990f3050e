"""Several data sets as one: how often examples of each are drawn, and batches of the mixture.

    rate of data set m   proportional to   min(e_m, K)^(1 / T)          of e_m examples

K keeps a large data set from taking all; T > 1 brings the rates nearer to one another, T = 1 is mixing in
proportion to the numbers of examples. Raffel et al. 2020, section 3.5.2.

An epoch has `size` examples, each data set's share of them. Every data set is read in an order of its own,
drawn anew each time it is used up, and goes on with it from epoch to epoch: what an epoch reads is a function
of the seed and the epoch alone, so that a run resumes where it stopped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.batching import Batch, Batches, Collate, Corrupt, Plan, Position, Row

_ORDER = 2  # what a random stream is for; see polyformer.data.batching


def mixing_rates(sizes: Sequence[int], limit: int | None = None, temperature: float = 1.0) -> list[float]:
    """The rates of data sets of so many examples; they add up to 1. `limit` is K, None for none."""
    if limit is not None and limit < 1:
        raise InputError(f"limit: expected 1 example or more, got {limit}")
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature: expected a number above 0, got {temperature}")
    if not sizes or min(sizes) < 1:
        raise InputError(f"sizes: expected an example or more of each data set, got {list(sizes)}")
    counted = np.array([size if limit is None else min(size, limit) for size in sizes], np.float64)
    weights = np.exp((np.log(counted) - np.log(counted.max())) / temperature)
    return (weights / weights.sum()).tolist()


def share_of_epoch(rate: float, size: int, epoch: int) -> range:
    """Which examples of an endless sequence an epoch of `size` takes: as many in all epochs but for one."""
    exact = Fraction(rate) * size
    return range(round(exact * epoch), round(exact * (epoch + 1)))


def drawn(count: int, places: range, seed: int, number: int) -> list[int]:
    """The examples at `places` of the endless sequence of data set `number`, which has `count`."""
    orders: dict[int, np.ndarray] = {}
    examples = []
    for place in places:
        turn, within = divmod(place, count)
        if turn not in orders:
            orders[turn] = np.random.default_rng([_ORDER, seed, number, turn]).permutation(count)
        examples.append(int(orders[turn][within]))
    return examples


@dataclass(frozen=True, eq=False)
class Mixture:
    """Batches of several data sets, drawn by `rates`, `size` examples an epoch; see `Batches`."""

    parts: Sequence[Sequence[Row]]
    rates: Sequence[float]
    size: int
    plan: Plan
    collate: Collate
    seed: int
    corrupt: Corrupt | None = None

    def rows(self, epoch: int) -> list[Row]:
        """The examples of an epoch, data set after data set."""
        return [
            part[example]
            for number, (part, rate) in enumerate(zip(self.parts, self.rates, strict=True))
            for example in drawn(len(part), share_of_epoch(rate, self.size, epoch), self.seed, number)
        ]

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """`(position after it, batch)` from `position` on."""
        batches = Batches(self.rows(epoch), self.plan, self.collate, self.seed, corrupt=self.corrupt)
        return batches.epoch(epoch, position=position)


@dataclass(frozen=True, eq=False)
class OneAfterAnother:
    """The batches of several data sets, those of each together: for evaluation."""

    parts: Sequence[Batches]

    def epoch(self, epoch: int) -> Iterator[tuple[Position, Batch]]:
        """As `Batches.epoch`."""
        for part in self.parts:
            yield from part.epoch(epoch)
