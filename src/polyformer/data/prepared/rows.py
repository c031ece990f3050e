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
from polyformer.data.permutation import shuffled
from polyformer.data.prepared.framed import FramedText

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
