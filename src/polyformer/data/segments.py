"""Documents read in order: every row of a batch goes on where it stood in the batch before.

    rows        r0  d3 d3 d3 d3 d0 | d0 d0 d0 d5 d5 | d5 ...
                r1  d5 d5 d5 d1 d1 | d1 d1 d4 d4 d4 | d4 ...
                    batch 0          batch 1

So a model that remembers finds in its memory what came before in each row. To train, the documents of an
epoch come in a random order, laid end to end and cut into rows of one length; the end of a document that a
cut parts from its beginning is a document of its own. Held out, whole documents are dealt to the rows, the
longest first, and no document is cut. Dai et al. 2019, section 3.2 (its released code: `LMOrderedIterator`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from polyformer.data.batching import Batch, Position
from polyformer.data.packing import IGNORED


class Laid(NamedTuple):
    """The rows of an epoch, [rows, longest] each: tokens, the number of their document, what they predict,
    and which token of all documents, end to end, they are (-1: of none)."""

    ids: np.ndarray
    documents: np.ndarray
    labels: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class Segments:
    """Batches {input_ids, document_ids, shift_labels} [rows, length] of `documents`, token ids each.

    The order is a function of (seed, epoch). Numbers of documents rise along a row, over epochs too, and with
    them alone a document ends: nothing is reset. `shift_labels` are the tokens that follow in the document,
    also those of the next batch, so that all but the first token of each document is predicted once. Rows
    that end before others are filled with `pad_id`, a document of its own that predicts nothing.

    With `neighbours` [tokens, k] of the documents, end to end, batches have `neighbour_ids` [rows, length, k]
    too, -1 where a row is filled.
    """

    documents: Sequence[Sequence[int]]
    length: int
    rows: int
    seed: int = 0
    shuffle: bool = True
    pad_id: int = 0
    neighbours: np.ndarray | None = None

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """`(position after it, batch)` from `position` on, as `Batches.epoch`."""
        laid = self.laid(epoch)
        number = Position(*position).batch
        for start in range(number * self.length, laid.ids.shape[1], self.length):
            number += 1
            parts = Laid(*(table[:, start : start + self.length].astype(np.int64) for table in laid))
            batch = {"input_ids": parts.ids, "document_ids": parts.documents, "shift_labels": parts.labels}
            if self.neighbours is not None:
                batch["neighbour_ids"] = rows_at(self.neighbours, parts.places)
            yield Position(0, number), {name: torch.from_numpy(part) for name, part in batch.items()}

    def laid(self, epoch: int) -> Laid:
        """All rows of an epoch."""
        count = len(self.documents)
        first = epoch * (count + 1)  # one number an epoch is that of the padding
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
        whole = whole[:, :, :-1]  # the last token of a row predicts nothing, and nobody follows who reads it
        return Laid(whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3])

    def _cut(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        """Rows of one length; the last one may be shorter."""
        text = np.hstack(pieces) if pieces else np.zeros((4, 0), np.int64)
        length = max(1, -(-text.shape[1] // self.rows))
        rows = [text[:, start : start + length].copy() for start in range(0, text.shape[1], length)]
        for row in rows:
            row[2, -1] = IGNORED  # its next token begins another row, which does not remember it
        return rows

    def _dealt(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        """Rows of whole documents, each in its order, and as equal as that makes them."""
        rows: list[list[int]] = [[] for _ in range(min(self.rows, len(pieces)))]
        lengths = [0] * len(rows)
        for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].shape[1]):
            shortest = lengths.index(min(lengths))
            rows[shortest].append(i)
            lengths[shortest] += pieces[i].shape[1]
        return [np.hstack([pieces[i] for i in sorted(row)]) for row in rows]


def rows_at(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The rows [..., k] of a table [N, k] at places [...], as int64; -1 where there is no place (-1)."""
    if not len(table):
        return np.full((*places.shape, table.shape[1]), -1, np.int64)
    return np.where(places[..., None] < 0, -1, table[places]).astype(np.int64)


def _piece(document: Sequence[int], number: int, start: int) -> np.ndarray:
    """[4, length]: tokens, the document's number, what each predicts, and their places from `start` on."""
    ids = np.asarray(document, np.int64)
    places = start + np.arange(len(ids))
    return np.stack([ids, np.full_like(ids, number), np.append(ids[1:], IGNORED), places])
