"""Two texts in one row: truncation of both, and rows of sentence pairs and translation pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polyformer.core.errors import InputError

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


def translation_row(
    source: Sequence[int],
    target: Sequence[int],
    *,
    begin_id: int,
    end_id: int,
    languages: tuple[int, int] = (0, 1),
    length: int | None = None,
) -> dict[str, np.ndarray]:
    """Return a translation pair as one row, int32 arrays of at most `length` tokens, for masked modelling.

        input_ids     <b> x x x <e> <b> y y <e>
        position_ids   0  1 2 3  4   0  1 2  3      restarted in the second language
        langs          0  0 0 0  0   1  1 1  1      a language for every token

    The longer text is truncated at its end. `begin_id` and `end_id` enclose each of the two, in XLM both
    </s>. `languages` are the numbers of the two languages in the model's table. Source: Lample and Conneau
    2019 (XLM), section 3.4 and figure 1.
    """
    if length is not None:
        if length < 6:
            raise InputError(f"length: expected 6 tokens or more, a token of each text in four, got {length}")
        kept = shares_of_capacity(len(source), len(target), length - 4)
        source, target = source[: kept[0]], target[: kept[1]]
    parts = [[begin_id, *ids, end_id] for ids in (source, target)]
    return {
        "input_ids": np.array([*parts[0], *parts[1]], np.int32),
        "position_ids": np.concatenate([np.arange(len(part), dtype=np.int32) for part in parts]),
        "langs": np.repeat(np.array(languages, np.int32), [len(part) for part in parts]),
    }
