"""Text with its structure: global tokens, one per sentence, before the tokens of all sentences.

    row = structured([[11, 12], [13]], global_id=1, global_tokens=4)

    input_ids       1  1 11 12 13      the global tokens, then the text
    segment_ids     0  1  0  0  1      the sentence of each token
    position_ids    0  1  4  5  6      the text starts at `global_tokens`, for any number of sentences
    token_type_ids  0  0  1  1  1      global, long
    attention_mask  1  1  1  1  1

The pattern `ETC(global_tokens, radius)` and the positions `etc_labels` require such rows. `Collate` makes a
batch of them for `model(**Collate(pad_id)([row, ...]))`. Global slots that a document does not need are left
out instead of padded: distances count only between tokens of the same part. Ainslie et al. 2020, section 3;
as in their released models all global tokens have the same id.
"""

import re
from collections.abc import Sequence

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.tokenizers.tokenizer import Tokenizer

Row = dict[str, np.ndarray]

END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, split after . ! and ? before white space, and at empty lines."""
    return [part.strip() for part in END.split(text) if part.strip()]


def sentence_row(tokenizer: Tokenizer, text: str, limit: int) -> tuple[list[str], dict[str, list[int]]]:
    """Return the first sentences of a text, and <cls> sentence <sep> for each, with types 0 and 1 in turn.

    Sentences that do not fit in `limit` tokens are left out; a longer first sentence is cut. A text without
    sentences is <cls> <sep>. The tokenizer must have both. Liu and Lapata 2019 (BertSum), section 3.1.
    """
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert cls is not None
    assert sep is not None
    sentences: list[str] = []
    ids: list[int] = []
    types: list[int] = []
    split = split_sentences(text)
    for number, pieces in enumerate(tokenizer.encode_batch(split)):
        row = [cls, *pieces, sep]
        if sentences and len(ids) + len(row) > limit:
            break
        row = [*row[: limit - 1], sep] if len(row) > limit else row
        sentences.append(split[number])
        ids += row
        types += [number % 2] * len(row)
    if not sentences:
        ids, types = [cls, sep], [0, 0]
    return sentences, {"input_ids": ids, "token_type_ids": types}


def structured(sentences: Sequence[Sequence[int]], *, global_id: int, global_tokens: int) -> Row:
    """Return a row of a document: int64 arrays [sentences + tokens] as above.

    Raises `InputError` for more sentences than `global_tokens`, for no sentences and for an empty sentence.
    """
    check_sentences(sentences, global_tokens)
    numbers = np.arange(len(sentences))
    lengths = np.array([len(sentence) for sentence in sentences])
    text = np.concatenate([np.asarray(sentence, dtype=np.int64) for sentence in sentences])
    places = np.arange(len(text)) + global_tokens
    return {
        "input_ids": np.concatenate([np.full(len(numbers), global_id, dtype=np.int64), text]),
        "segment_ids": np.concatenate([numbers, numbers.repeat(lengths)]),
        "position_ids": np.concatenate([numbers, places]),
        "token_type_ids": np.concatenate([np.zeros_like(numbers), np.ones_like(places)]),
        "attention_mask": np.ones(len(numbers) + len(text), dtype=np.int64),
    }


def check_sentences(sentences: Sequence[Sequence[int]], global_tokens: int) -> None:
    """Raise `InputError` unless there are sentences, none empty, and a global token for each."""
    if not 1 <= len(sentences) <= global_tokens:
        raise InputError(
            f"sentences: expected 1 to {global_tokens} (global_tokens), got {len(sentences)}; "
            "cut the document with `documents_of` or raise global_tokens"
        )
    for number, sentence in enumerate(sentences):
        if not len(sentence):
            raise InputError(f"sentences: expected tokens in each, got none in number {number}; leave it out")


def documents_of(
    sentences: Sequence[Sequence[int]], *, global_tokens: int, long_tokens: int
) -> list[list[Sequence[int]]]:
    """Split sentences into documents of at most `global_tokens` sentences and `long_tokens` tokens, in order.

    Empty sentences are left out; a sentence longer than `long_tokens` is split into several.
    """
    if min(global_tokens, long_tokens) < 1:
        raise InputError(
            f"global_tokens, long_tokens: expected 1 or more, got {global_tokens} and {long_tokens}"
        )
    documents: list[list[Sequence[int]]] = []
    capacity = 0
    for whole in sentences:
        for piece in (whole[i : i + long_tokens] for i in range(0, len(whole), long_tokens)):
            if not documents or len(piece) > capacity or len(documents[-1]) == global_tokens:
                documents.append([])
                capacity = long_tokens
            documents[-1].append(piece)
            capacity -= len(piece)
    return documents
