"""Packed rows of prepared text, and batches of them in a shuffled order that is computed instead of stored.

The order is a function of (seed, epoch), and a batch a function of its number: a run resumes in the middle of
an epoch immediately, and each process reads only the rows of its batches. Several texts are mixed as in
`polyformer.data.mixing`: each is read in a separate order, drawn anew when it is used up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polyformer.data.batching import CORRUPTION, ORDER, Batch, Collate, Corrupt, Position, Row
from polyformer.data.mixing import share_of_epoch
from polyformer.data.packing import packed_row
from polyformer.data.prepared.folder import FramedText

_MIXED = 3  # purpose of a random stream; see polyformer.data.batching


@dataclass(frozen=True, eq=False)
class PackedText:
    """The rows of `polyformer.data.pack(documents, length, last="drop")`, each computed on access.

    A text shorter than a row is one padded row.
    """

    text: FramedText
    length: int
    pad_id: int

    def __len__(self) -> int:
        return max(len(self.text) // self.length, 1)

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.length
        pieces = self.text.pieces(start, min(start + self.length, len(self.text)))
        masked = len(self.text) < self.length
        return packed_row([(ids, 0) for _, ids in pieces], self.length, self.pad_id, masked)


@dataclass(frozen=True, eq=False)
class MappedBatches:
    """Batches of `rows` rows of `parts`, drawn by `rates`; an epoch has the total number of their rows."""

    parts: Sequence[PackedText]
    rates: Sequence[float]
    rows: int
    collate: Collate
    seed: int
    corrupt: Corrupt | None = None

    def shares(self, epoch: int) -> list[range]:
        """Return the range of each part's endless order that an epoch reads."""
        size = sum(map(len, self.parts))
        return [share_of_epoch(rate, size, epoch) for rate in self.rates]

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        first = Position(*position).batch
        for number, batch in enumerate(self.batches(epoch, first, 1), first + 1):
            yield Position(0, number), batch

    def batches(self, epoch: int, first: int, step: int) -> Iterator[Batch]:
        """Yield the batches first, first + step, first + 2 step, ... of an epoch, without reading others."""
        shares = self.shares(epoch)
        ends = np.cumsum([len(share) for share in shares])
        for start in range(first * self.rows, int(ends[-1]), step * self.rows):
            places = np.arange(start, min(start + self.rows, int(ends[-1])))
            drawn = shuffled(places, int(ends[-1]), ORDER, self.seed, epoch)
            parts = np.searchsorted(ends, drawn, "right")
            stops = np.array([share.stop for share in shares])
            yield self.collate(self._rows(parts, drawn - ends[parts] + stops[parts], epoch))

    def _rows(self, parts: np.ndarray, places: np.ndarray, epoch: int) -> list[Row]:
        """Return the rows at these places of the endless orders of these parts, both [rows]."""
        turns, numbers = np.divmod(places, np.array([len(part) for part in self.parts])[parts])
        for part, turn in {*zip(parts.tolist(), turns.tolist())}:
            same = (parts == part) & (turns == turn)
            key = _MIXED, self.seed, part, turn
            numbers[same] = shuffled(numbers[same], len(self.parts[part]), *key)
        rows = [self.parts[part][number] for part, number in zip(parts.tolist(), numbers.tolist())]
        if self.corrupt is None:
            return rows
        keys = ([CORRUPTION, self.seed, epoch, *at] for at in zip(parts.tolist(), places.tolist()))
        return [self.corrupt(row, np.random.default_rng(key)) for row, key in zip(rows, keys)]


TURNS = 12


def shuffled(places: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return the items, of `count`, at these places of the order drawn by `key`, int64 like `places`.

    The order is a permutation of 0, ..., count - 1. Time and memory grow only with the size of `places`:

        x = (left, right), 2 h bits;   (left, right) <- (right, left ^ F_k(right))   for k = 1, ..., 12

    A Feistel network permutes the numbers of 2 h bits, for any F; here F is a hash of its input and the key
    of each round. To permute only n numbers, results outside go through the network again until they are
    inside ("cycle walking"): at most four passes on average, for 2^(2 h) < 4 n. Source: Luby and Rackoff
    1988; Black and Rogaway 2002 (Ciphers with arbitrary finite domains), section 3.
    """
    half = np.uint64(max(1, -(-max(count - 1, 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.default_rng(key).integers(0, 2**64, TURNS, dtype=np.uint64)
    numbers = np.array(places, np.uint64)
    outside = np.ones(numbers.shape, bool)
    while outside.any():
        left, right = numbers[outside] >> half, numbers[outside] & low
        for turn in keys:
            left, right = right, left ^ (_hash(right + turn) & low)
        numbers[outside] = left << half | right
        outside = numbers >= np.uint64(count)
    return numbers.astype(np.int64)


def _hash(x: np.ndarray) -> np.ndarray:
    """Return the mixing function of SplitMix64 (Steele et al. 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
