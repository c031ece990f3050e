"""Rows of whole documents with labels for only some tokens.

Documents are not cut, so rows are not full. The longest document is placed first, each in the fullest row
with enough space (best fit, decreasing lengths), which leaves few gaps. Rows end at their last document;
padding is added by the batch.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.rows.packing import IGNORED, packed_row

Marked = tuple[Sequence[int], Sequence[bool]]
"""The token ids of a document, and which of them have labels."""


def pack_whole(documents: Sequence[Marked], length: int) -> list[dict[str, np.ndarray]]:
    """Return rows of at most `length` tokens with the fields of `packing.pack`; label -100 if not learned.

    The documents of a row, and the rows by their first document, keep their order. Raises `InputError` for a
    longer document.
    """
    longest = max((len(ids) for ids, _ in documents), default=0)
    if longest > length:
        raise InputError(f"length: a document has {longest} tokens, more than the {length} of a row")
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, row), in this order
    for number in sorted(range(len(documents)), key=lambda number: -len(documents[number][0])):
        size = len(documents[number][0])
        place = bisect_left(spaces, (size, -1))
        if place == len(spaces):
            rows.append([])
            spaces.append((length, len(rows) - 1))
            place = len(spaces) - 1
        space, row = spaces.pop(place)
        rows[row].append(number)
        insort(spaces, (space - size, row))
    return [marked_row([documents[number] for number in sorted(row)]) for row in sorted(rows, key=min)]


def marked_row(documents: Sequence[Marked]) -> dict[str, np.ndarray]:
    """Return a row of these documents, without padding."""
    pieces = [(np.asarray(ids, np.int32), 0) for ids, _ in documents]
    row = packed_row(pieces, sum(len(ids) for ids, _ in pieces), 0, masked=False)
    learned = np.concatenate([np.asarray(marks, bool) for _, marks in documents])
    row["labels"] = np.where(learned, row["labels"], IGNORED).astype(np.int32)
    return row
