"""Two texts in one row: truncation of both, and rows of sentence pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Ids = Sequence[int]


class Pair(NamedTuple):
    """Token ids of two texts, and the class of the pair."""

    first: Ids
    second: Ids
    label: int


def shares_of_capacity(first: int, second: int, length: int) -> tuple[int, int]:
    """Return two lengths reduced to a sum of `length`.

    The longer length, or the second of equal lengths, is reduced by one repeatedly.
    """
    if first + second <= length:
        return first, second
    kept = min(first, max(length - second, (length + 1) // 2))
    return kept, length - kept


def cut_pair(first: Ids, second: Ids, length: int, generator: np.random.Generator) -> tuple[Ids, Ids]:
    """Truncate both texts to `length` tokens in total: the longer loses tokens, from its front or its back.

    Source: the released create_pretraining_data.py of BERT (Devlin et al. 2019).
    """
    kept = shares_of_capacity(len(first), len(second), length)
    return _cut(first, kept[0], generator), _cut(second, kept[1], generator)


def _cut(ids: Ids, kept: int, generator: np.random.Generator) -> Ids:
    front = int(generator.binomial(len(ids) - kept, 0.5))
    return ids[front : front + kept]


def pair_row(pair: Pair, *, cls_id: int, sep_id: int) -> dict[str, list[int] | int]:
    """Return the row <cls> first <sep> second <sep>.

    Token types are 0 up to the first <sep> and 1 after it. The row has `sentence_labels`. Source: Devlin et
    al. 2019, section 3.1 and figure 2.
    """
    return {
        "input_ids": [cls_id, *pair.first, sep_id, *pair.second, sep_id],
        "token_type_ids": [0] * (len(pair.first) + 2) + [1] * (len(pair.second) + 1),
        "sentence_labels": pair.label,
    }
