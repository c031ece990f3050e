"""Rows of token ids, and batches of rows, and of a mixture of data sets, in an order that resumes exactly.

The modules of this package make rows; here they become batches. The order is a pure function of (seed,
epoch). `Batches` serves rows held in memory. `Stream` serves rows that do not fit into memory as a sequence
of blocks, each a small `Batches`. Both yield `(position, batch)` pairs. The position after a batch, two
integers for a checkpoint, makes `epoch(...)` resume there without reading the rows before. No global random
state is read or set.

A mixture samples the examples of several data sets:

    rate of data set m   proportional to   min(e_m, K)^(1 / T)          of e_m examples

K limits the rate of large data sets. T > 1 makes the rates more equal; T = 1 is mixing in proportion to the
numbers of examples. Raffel et al. 2020, section 3.5.2.

An epoch has `size` examples, shared among the data sets. Every data set is read in a separate order, drawn
anew whenever it is used up and continued from epoch to epoch. The content of an epoch is a function of the
seed and the epoch only, so that a run resumes exactly.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from polyformer.core.errors import InputError

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
Plan = Callable[[np.ndarray, np.random.Generator | None], list[np.ndarray]]
Corrupt = Callable[[Row, np.random.Generator], Row]

_FILL = {"labels": -100, "neighbour_ids": -1}
_TOKEN_KEYS = ("input_ids", "decoder_input_ids")
ORDER, CORRUPTION = 0, 1  # the purpose of a random stream, first in its seed, so that streams differ


class Position(NamedTuple):
    """A position in an epoch: the first source row of the block, and the number of its completed batches."""

    start: int = 0
    batch: int = 0


def by_rows(
    lengths: np.ndarray, generator: np.random.Generator | None, *, batch_size: int
) -> list[np.ndarray]:
    """Return the row numbers of each batch: `batch_size` rows, maybe fewer in the last.

    Without `generator`, rows are in order. Of `lengths` [rows, sides] only the number of rows is used.
    """
    if batch_size < 1:
        raise InputError(f"batch_size: expected at least 1 row, got {batch_size}")
    order = np.arange(len(lengths)) if generator is None else generator.permutation(len(lengths))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def by_tokens(
    lengths: np.ndarray, generator: np.random.Generator | None, *, max_tokens: int
) -> list[np.ndarray]:
    """Return the row numbers of each batch: rows of similar length, at most `max_tokens` tokens per side.

    Padding is included in these tokens. `lengths` is [rows, sides]: one side, or source and target. Rows are
    sorted by length, equal rows in random order, and the batches are in random order; without `generator`,
    longest first. Source: Vaswani et al. 2017, section 5.1.
    """
    longest = lengths.max(axis=1, initial=0)
    if len(longest) and longest.max() > max_tokens:
        row = int(longest.argmax())
        raise InputError(
            f"max_tokens: row {row} has {longest[row]} tokens, more than a batch of {max_tokens}: "
            "raise max_tokens or shorten the rows"
        )
    shuffled = np.arange(len(lengths)) if generator is None else generator.permutation(len(lengths))
    # Longest first, and rows of equal length by their first side: a batch then has little padding on either
    # side.
    order = shuffled[np.lexsort((*-lengths[shuffled].T[::-1], -longest[shuffled]))]
    batches = []
    start = 0
    while start < len(order):
        size = max_tokens // max(1, int(longest[order[start]]))  # the first row of a batch is its longest
        batches.append(order[start : start + size])
        start += size
    return batches if generator is None else [batches[i] for i in generator.permutation(len(batches))]


def padding_share(lengths: np.ndarray, batches: Sequence[np.ndarray]) -> float:
    """Return the share of padding in all sides together; `lengths` is [rows, sides]."""
    cells = sum(len(batch) * int(lengths[batch].max(axis=0).sum()) for batch in batches)
    return 1 - int(lengths.sum()) / cells if cells else 0.0


def row_lengths(rows: Sequence[Row]) -> np.ndarray:
    """Return lengths [rows, 1], or [rows, 2] if rows have a sequence of labels (source and target).

    Rows without tokens have length 1.
    """
    if rows and "input_ids" not in rows[0]:
        return np.ones((len(rows), 1), np.int64)
    sides = ["input_ids"]
    if rows and np.ndim(rows[0].get("labels", 0)) == 1:
        sides.append("labels")
    return np.array([[len(row[side]) for side in sides] for row in rows], dtype=np.int64).reshape(
        -1, len(sides)
    )


@dataclass(frozen=True)
class Collate:
    """A function from rows to a batch of tensors [B, T, ...], right-padded to the longest row.

    They are long, or float32 if the rows have floating-point numbers. T is rounded up to a multiple of
    `multiple`. Token ids are padded with `pad_id`, labels with -100, `document_ids` with a new document,
    `position_ids` with the last position, everything else with 0. Single numbers (class labels, span ends)
    become [B]. Rows that are not packed get an `attention_mask` (1 = keep).
    """

    pad_id: int
    multiple: int = 1

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = {key: self._stack(key, [np.asarray(row[key]) for row in rows]) for key in rows[0]}
        if "attention_mask" not in batch and "document_ids" not in batch:
            kept = [np.ones(len(row["input_ids"]), np.int64) for row in rows]
            batch["attention_mask"] = self._stack("attention_mask", kept)
        return batch

    def _stack(self, key: str, values: list[np.ndarray]) -> torch.Tensor:
        kind = np.float32 if values[0].dtype.kind == "f" else np.int64
        if values[0].ndim == 0:
            return torch.from_numpy(np.stack(values).astype(kind))
        width = max(map(len, values))
        width += -width % self.multiple
        fill = self.pad_id if key in _TOKEN_KEYS else _FILL.get(key, 0)
        stacked = np.full((len(values), width, *values[0].shape[1:]), fill, kind)
        for target, value in zip(stacked, values):
            target[: len(value)] = value
            if key == "document_ids" and len(value):
                target[len(value) :] = value[-1] + 1
            if key == "position_ids" and len(value):  # position 0 would be a real position
                target[len(value) :] = value[-1]
        return torch.from_numpy(stacked)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of `rows` in memory, by a `plan` such as `partial(by_tokens, max_tokens=4096)`.

    `corrupt(row, generator)`, if given, changes each row when it is served. It gets a separate generator for
    (seed, epoch, row), so that the result depends neither on the batch nor on the process. Without `shuffle`,
    rows are in order (`by_rows`) or longest first (`by_tokens`) and are corrupted identically every time, for
    evaluation. `start` is the number of the first row in the whole source.
    """

    rows: Sequence[Row]
    plan: Plan
    collate: Callable[[Sequence[Row]], Batch]
    seed: int = 0
    shuffle: bool = True
    corrupt: Corrupt | None = None
    start: int = 0

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each row, [rows, sides]."""
        return row_lengths(self.rows)

    def order(self, epoch: int) -> list[np.ndarray]:
        """Return the row numbers of every batch of `epoch`, across all processes."""
        generator = np.random.default_rng([ORDER, self.seed, epoch, self.start]) if self.shuffle else None
        return self.plan(self.lengths, generator)

    def epoch(
        self, epoch: int, *, position: Sequence[int] = Position(), rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on: the share of process `rank`, {} if empty.

        Together the processes take each row once; sizes differ by at most one.
        """
        batches = self.order(epoch)
        for number in range(Position(*position).batch, len(batches)):
            rows = [self._row(int(i), epoch) for i in batches[number][rank::world]]
            yield Position(self.start, number + 1), (self.collate(rows) if rows else {})

    def _row(self, index: int, epoch: int) -> Row:
        if self.corrupt is None:
            return self.rows[index]
        epoch = epoch if self.shuffle else 0
        return self.corrupt(
            self.rows[index], np.random.default_rng([CORRUPTION, self.seed, epoch, self.start, index])
        )


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches of a `source` larger than memory: any re-iterable of rows, such as a streaming data set.

    The source is read in order, in blocks of about `buffer` characters (default 4 Mi; list items count as 1).
    `prepare` converts the rows of a block to rows of token ids (tokenize, pack), and each block is shuffled
    and batched like `Batches`. A restored position skips source rows without preparing them.
    """

    source: Iterable[Row]
    prepare: Callable[[list[Row]], Sequence[Row]]
    plan: Plan
    collate: Callable[[Sequence[Row]], Batch]
    seed: int = 0
    shuffle: bool = True
    corrupt: Corrupt | None = None
    buffer: int = 2**22

    def epoch(
        self, epoch: int, *, position: Sequence[int] = Position(), rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Position, Batch]]:
        """Yield like `Batches.epoch`; the positions are not interchangeable with its positions."""
        position = Position(*position)
        for start, raw in self._blocks(position.start):
            rows = self.prepare(raw)
            block = Batches(rows, self.plan, self.collate, self.seed, self.shuffle, self.corrupt, start)
            done = position.batch if start == position.start else 0
            yield from block.epoch(epoch, position=Position(start, done), rank=rank, world=world)

    def _blocks(self, start: int) -> Iterator[tuple[int, list[Row]]]:
        block: list[Row] = []
        size = 0
        for row in itertools.islice(self.source, start, None):
            block.append(row)
            size += sum(len(value) for value in row.values() if isinstance(value, str | list))
            if size >= self.buffer:
                yield start, block
                start, block, size = start + len(block), [], 0
        if block:
            yield start, block


@dataclass(frozen=True)
class NumberedBatches:
    """Numbered batches, `count` per epoch, each {"number": [[epoch, number in it]]}."""

    count: int

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        for number in range(Position(*position).batch, self.count):
            yield Position(0, number + 1), {"number": torch.tensor([[epoch, number]])}


_ORDER = 2  # purpose of a random stream; see polyformer.data.rows


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
