"""Prepared documents read in order, like `polyformer.data.segments`, without an epoch in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polyformer.data.batching import Batch, Position
from polyformer.data.packing import IGNORED
from polyformer.data.prepared.folder import FramedText

GROUPS = 2**22
"""The most entries of an epoch's order: documents, or groups of neighbouring documents."""


@dataclass(frozen=True, eq=False)
class MappedSegments:
    """The batches of `Segments(documents, length, rows, seed)`.

    With more than `GROUPS` documents, groups of neighbours are shuffled instead of documents.
    """

    text: FramedText
    length: int
    rows: int
    seed: int
    pad_id: int

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        order = _Order(self.text, self.seed, epoch)
        total = len(self.text)
        length = max(1, -(-total // self.rows))
        starts = range(0, total, length)
        first = Position(*position).batch
        for number, start in enumerate(range(first * self.length, length - 1, self.length), first + 1):
            stop = min(start + self.length, length - 1)
            rows = [self._row(order, row, min(row + length, total), start, stop) for row in starts]
            names = "input_ids", "document_ids", "shift_labels"
            yield (
                Position(0, number),
                {name: torch.from_numpy(np.stack(tables)) for name, tables in zip(names, zip(*rows))},
            )

    def _row(self, order: "_Order", row: int, end: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Return tokens, documents and labels of columns `start` to `stop` of the row from `row` to `end`."""
        ids, documents = np.full(stop - start + 1, self.pad_id), np.full(stop - start + 1, order.padding)
        filled = 0
        for number, piece in order.pieces(row + start, min(row + stop + 1, end)):
            ids[filled : filled + len(piece)], documents[filled : filled + len(piece)] = piece, number
            filled += len(piece)
        goes_on = (documents[1:] == documents[:-1]) & (documents[1:] != order.padding)
        return ids[:-1], documents[:-1], np.where(goes_on, ids[1:], IGNORED)


class _Order:
    """The documents of an epoch end to end, in its order; `padding` is the document number of padding."""

    def __init__(self, text: FramedText, seed: int, epoch: int):
        self.text, count = text, len(text.split)
        self.size = -(-count // GROUPS)  # documents per group
        self.group_starts = text.starts(self.size)
        groups = len(self.group_starts) - 1
        self.order = np.random.default_rng([seed, epoch]).permutation(groups)
        self.starts = np.cumsum([0, *np.diff(self.group_starts)[self.order].tolist()])
        sizes = np.minimum(self.size, count - self.size * np.arange(groups))
        self.numbers = epoch * (count + 1) + np.cumsum([0, *sizes[self.order].tolist()])
        self.padding = epoch * (count + 1) + count

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number in the epoch, token ids) of each document, or part of it, between two positions."""
        place = int(np.searchsorted(self.starts, start, "right")) - 1
        while start < stop:
            group, end = int(self.order[place]), min(stop, int(self.starts[place + 1]))
            shift = int(self.group_starts[group]) - int(self.starts[place])
            for number, ids in self.text.pieces(start + shift, end + shift):
                yield int(self.numbers[place]) + number - group * self.size, ids
            start, place = end, place + 1
