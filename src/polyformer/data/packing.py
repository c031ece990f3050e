"""Packing of documents into rows of equal length: no padding inside, no loss, no mixing of documents.

Documents are concatenated and cut every `length` tokens. A document's continuation in the next row is a new
document there, with positions from 0, so that rows are independent.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from polyformer.core.errors import InputError

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
