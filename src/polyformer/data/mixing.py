"""Mixtures of several data sets: sampling rates of their examples, and batches of the mixture.

    rate of data set m   proportional to   min(e_m, K)^(1 / T)          of e_m examples

K limits the rate of large data sets. T > 1 makes the rates more equal; T = 1 is mixing in proportion to the
numbers of examples. Raffel et al. 2020, section 3.5.2.

An epoch has `size` examples, shared among the data sets. Every data set is read in a separate order, drawn
anew whenever it is used up and continued from epoch to epoch. The content of an epoch is a function of the
seed and the epoch only, so that a run resumes exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.batching import Batch, Batches, Collate, Corrupt, Plan, Position, Row

_ORDER = 2  # purpose of a random stream; see polyformer.data.batching


def mixing_rates(sizes: Sequence[int], limit: int | None = None, temperature: float = 1.0) -> list[float]:
    """Return the rates of data sets with these sizes; their sum is 1. `limit` is K, None for no limit."""
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
    """Return the range of an endless sequence that an epoch reads: `rate` * `size` examples, rounded."""
    exact = Fraction(rate) * size
    return range(round(exact * epoch), round(exact * (epoch + 1)))


def draw_order(count: int, places: range, seed: int, number: int) -> list[int]:
    """Return the examples at `places` of the endless sequence of data set `number` with `count` examples."""
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
    """Batches of several data sets, drawn by `rates`, with `size` examples per epoch; see `Batches`."""

    parts: Sequence[Sequence[Row]]
    rates: Sequence[float]
    size: int
    plan: Plan
    collate: Collate
    seed: int
    corrupt: Corrupt | None = None

    def rows(self, epoch: int) -> list[Row]:
        """Return the examples of an epoch, data set after data set."""
        return [
            part[example]
            for number, (part, rate) in enumerate(zip(self.parts, self.rates, strict=True))
            for example in draw_order(len(part), share_of_epoch(rate, self.size, epoch), self.seed, number)
        ]

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on."""
        batches = Batches(self.rows(epoch), self.plan, self.collate, self.seed, corrupt=self.corrupt)
        return batches.epoch(epoch, position=position)


@dataclass(frozen=True, eq=False)
class Concatenation:
    """Batches of several data sets in sequence, for evaluation."""

    parts: Sequence[Batches]

    def epoch(self, epoch: int) -> Iterator[tuple[Position, Batch]]:
        """Yield like `Batches.epoch`."""
        for part in self.parts:
            yield from part.epoch(epoch)
