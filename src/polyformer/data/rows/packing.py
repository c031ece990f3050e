"""Documents end to end: packed rows, and documents that batches read in order.

Packed rows have equal length, without padding inside, loss or mixing of documents. Documents are concatenated
and cut every `length` tokens. A document's continuation in the next row is a new document there, with
positions from 0, so that rows are independent.

In order, every row of a batch continues the same row of the previous batch:

    rows        r0  d3 d3 d3 d3 d0 | d0 d0 d0 d5 d5 | d5 ...
                r1  d5 d5 d5 d1 d1 | d1 d1 d4 d4 d4 | d4 ...
                    batch 0          batch 1

So the memory of a model such as Transformer-XL contains the preceding text of each row. For training, the
documents of an epoch are concatenated in random order and cut into rows of equal length; the rest of a
document after a cut is a separate document. Held-out documents are not cut: they are distributed to the rows,
the longest first. Dai et al. 2019, section 3.2 (its released code: `LMOrderedIterator`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from polyformer.core.errors import InputError
from polyformer.data.rows.batching import Batch, Position

IGNORED = -100


def pack(
    documents: Iterable[Sequence[int]],
    length: int,
    *,
    pad_id: int = 0,
    last: Literal["pad", "drop"] = "pad",
    overlap: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield rows of `length` tokens from `documents` (token ids each), lazily and in order.

    Each row contains int32 arrays [length]: `input_ids`; `document_ids`, from 0 in each row; `position_ids`,
    from 0 in each document; `labels`, the input ids, -100 on padded or repeated tokens. With `last="pad"` the
    last, partial row is filled with `pad_id` (as a separate document) and every row has an `attention_mask`
    (1 = keep); with `last="drop"` a partial row is left out. `overlap` tokens (default 0) are repeated
    without label at the beginning of a continued document: with 1, every token except the first of each
    document is predicted once.
    """
    if length < 1:
        raise InputError(f"length: expected at least 1 token per row, got {length}")
    if not 0 <= overlap < length:
        raise InputError(f"overlap: expected 0 to {length - 1} for rows of {length} tokens, got {overlap}")
    pieces: list[tuple[np.ndarray, int]] = []
    capacity = length
    for document in documents:
        ids = np.asarray(document, dtype=np.int32)
        start = repeated = 0
        while start + repeated < len(ids):
            piece = ids[start : start + capacity]
            pieces.append((piece, repeated))
            capacity -= len(piece)
            start, repeated = start + len(piece), 0
            if capacity == 0:
                yield packed_row(pieces, length, pad_id, masked=last == "pad")
                pieces, capacity = [], length
                # A document that is cut continues in an empty row, which has space for the repeated tokens.
                repeated = min(overlap, start)
                start -= repeated
    if pieces and last == "pad":
        yield packed_row(pieces, length, pad_id, masked=True)


def packed_row(
    pieces: list[tuple[np.ndarray, int]], length: int, pad_id: int, masked: bool
) -> dict[str, np.ndarray]:
    """Return a row of `pack` from `pieces`: (ids, number of ids that repeat the previous row)."""
    row = {
        "input_ids": np.full(length, pad_id, np.int32),
        "document_ids": np.full(length, len(pieces), np.int32),
        "position_ids": np.zeros(length, np.int32),
        "labels": np.full(length, IGNORED, np.int32),
    }
    start = 0
    for number, (ids, repeated) in enumerate(pieces):
        stop = start + len(ids)
        row["input_ids"][start:stop] = ids
        row["document_ids"][start:stop] = number
        row["position_ids"][start:stop] = np.arange(len(ids))
        row["labels"][start + repeated : stop] = ids[repeated:]
        start = stop
    row["position_ids"][start:] = np.arange(length - start)
    if masked:
        row["attention_mask"] = (np.arange(length) < start).astype(np.int32)
    return row


class SegmentLayout(NamedTuple):
    """The rows of an epoch, [rows, longest] each.

    ids: tokens. documents: the document number of each token. labels: the next tokens. places: index among
    the tokens of all documents, end to end (-1 for padding).
    """

    ids: np.ndarray
    documents: np.ndarray
    labels: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class Segments:
    """Batches {input_ids, document_ids, shift_labels} [rows, length] of `documents`, token ids each.

    The order is a function of (seed, epoch). Document numbers increase along a row and across epochs, and
    only they mark the end of a document: no state is reset. `shift_labels` are the next tokens of the
    document, even if they are in the next batch, so that every token except the first of each document is
    predicted once. Rows that end before others are filled with `pad_id`, a separate document without
    predictions.

    With `neighbours` [tokens, k] of the documents, end to end, batches also have `neighbour_ids` [rows,
    length, k], -1 for padding.
    """

    documents: Sequence[Sequence[int]]
    length: int
    rows: int
    seed: int = 0
    shuffle: bool = True
    pad_id: int = 0
    neighbours: np.ndarray | None = None

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        laid = self.laid(epoch)
        number = Position(*position).batch
        for start in range(number * self.length, laid.ids.shape[1], self.length):
            number += 1
            parts = SegmentLayout(*(table[:, start : start + self.length].astype(np.int64) for table in laid))
            batch = {"input_ids": parts.ids, "document_ids": parts.documents, "shift_labels": parts.labels}
            if self.neighbours is not None:
                batch["neighbour_ids"] = rows_at(self.neighbours, parts.places)
            yield Position(0, number), {name: torch.from_numpy(part) for name, part in batch.items()}

    def laid(self, epoch: int) -> SegmentLayout:
        """Return all rows of an epoch."""
        count = len(self.documents)
        first = epoch * (count + 1)  # the extra number is for padding
        order = np.arange(count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(count)
        starts = np.cumsum([0, *map(len, self.documents)])
        pieces = [
            _piece(self.documents[i], first + place, int(starts[i])) for place, i in enumerate(order.tolist())
        ]
        rows = self._cut(pieces) if self.shuffle else self._dealt(pieces)
        longest = max((row.shape[1] for row in rows), default=0)
        filling = np.array([[self.pad_id], [first + count], [IGNORED], [-1]])
        whole = np.stack([np.hstack([row, filling.repeat(longest - row.shape[1], 1)]) for row in rows])
        whole = whole[:, :, :-1]  # the last token of a row predicts nothing and is not needed as input
        return SegmentLayout(whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3])

    def _cut(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        """Return rows of equal length; the last may be shorter."""
        text = np.hstack(pieces) if pieces else np.zeros((4, 0), np.int64)
        length = max(1, -(-text.shape[1] // self.rows))
        rows = [text[:, start : start + length].copy() for start in range(0, text.shape[1], length)]
        for row in rows:
            row[2, -1] = IGNORED  # its next token is in another row, without this context
        return rows

    def _dealt(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        """Return rows of whole documents, each in order, of similar length."""
        rows: list[list[int]] = [[] for _ in range(min(self.rows, len(pieces)))]
        lengths = [0] * len(rows)
        for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].shape[1]):
            shortest = lengths.index(min(lengths))
            rows[shortest].append(i)
            lengths[shortest] += pieces[i].shape[1]
        return [np.hstack([pieces[i] for i in sorted(row)]) for row in rows]


def rows_at(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the rows [..., k] of a table [N, k] at places [...], as int64; -1 for places of -1."""
    if not len(table):
        return np.full((*places.shape, table.shape[1]), -1, np.int64)
    return np.where(places[..., None] < 0, -1, table[places]).astype(np.int64)


def _piece(document: Sequence[int], number: int, start: int) -> np.ndarray:
    """Return [4, length]: tokens, the document's number, labels, and their places from `start` on."""
    ids = np.asarray(document, np.int64)
    places = start + np.arange(len(ids))
    return np.stack([ids, np.full_like(ids, number), np.append(ids[1:], IGNORED), places])
