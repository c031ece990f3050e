"""Two texts in one row: truncation, translations, and segments of documents.

From pairs of segments a model learns whether the second follows the first, or their order. A document is a
list of sentences, a sentence a list of token ids. Sentences are collected up to `length` tokens and split in
two after one of them, which gives a pair:

    label  next_sentence_pairs              sentence_order_pairs
    0      A, and B that follows it         A, and B that follows it
    1      A, and a piece of another text   B, and A that precedes it

For `short_share` of the documents fewer tokens are collected, 2 to `length` with equal probability. All
functions are pure in the documents and the generator.

Source: Devlin et al. 2019 (BERT), section 3.1, task 2, and appendix A.2, with the choices of the released
create_pretraining_data.py; Lan et al. 2020 (ALBERT), section 3.1, and section 4.1 for the share of 10 %.
"""

from collections.abc import Iterator, Sequence
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


Document = Sequence[Ids]


def next_sentence_pairs(
    documents: Sequence[Document], generator: np.random.Generator, *, length: int, short_share: float = 0.1
) -> Iterator[Pair]:
    """Yield pairs: half of the second segments follow the first, the others are from another document.

    The text that would have followed is returned and begins the next pair. If only one sentence is left, its
    second segment always comes from another document, where it starts at a random sentence. Pairs longer than
    `length` tokens are cut: see `cut_pair`.
    """
    documents = _filled(documents, length, short_share)
    if len(documents) < 2:
        raise InputError(
            f"documents: expected two or more with text in them, got {len(documents)}; a plain text is one "
            "document unless data.format says what ends one (paragraphs, articles, lines)"
        )
    for number, document in enumerate(documents):
        target = _target(length, short_share, generator)
        start = 0
        while start < len(document):
            stop = _gather(document, start, target)
            alone = stop - start == 1
            middle = stop if alone else start + int(generator.integers(1, stop - start))
            first = _joined(document[start:middle])
            if alone or generator.random() < 0.5:
                second, label = _elsewhere(documents, number, target - len(first), generator), 1
                start = middle
            else:
                second, label = _joined(document[middle:stop]), 0
                start = stop
            yield Pair(*cut_pair(first, second, length, generator), label)


def sentence_order_pairs(
    documents: Sequence[Document], generator: np.random.Generator, *, length: int, short_share: float = 0.1
) -> Iterator[Pair]:
    """Yield pairs, half of them swapped. A single collected sentence makes no pair."""
    for document in _filled(documents, length, short_share):
        target = _target(length, short_share, generator)
        start = 0
        while start < len(document):
            stop = _gather(document, start, target)
            if stop - start > 1:
                middle = start + int(generator.integers(1, stop - start))
                first, second = _joined(document[start:middle]), _joined(document[middle:stop])
                first, second = cut_pair(first, second, length, generator)
                swapped = bool(generator.random() < 0.5)
                yield Pair(second, first, 1) if swapped else Pair(first, second, 0)
            start = stop


def _filled(documents: Sequence[Document], length: int, short_share: float) -> list[list[Ids]]:
    """Return the documents without empty sentences and documents."""
    if length < 2:
        raise InputError(f"length: expected 2 tokens or more for a pair, got {length}")
    if not 0 <= short_share <= 1:
        raise InputError(f"short_share: expected a share in [0, 1], got {short_share}")
    filled = ([sentence for sentence in document if len(sentence)] for document in documents)
    return [document for document in filled if document]


def _target(length: int, short_share: float, generator: np.random.Generator) -> int:
    return int(generator.integers(2, length + 1)) if generator.random() < short_share else length


def _gather(document: Document, start: int, target: int) -> int:
    """Return the end of the sentences from `start` on that have `target` tokens or end the document."""
    tokens, stop = 0, start
    while stop < len(document) and tokens < target:
        tokens += len(document[stop])
        stop += 1
    return stop


def _elsewhere(documents: list[list[Ids]], number: int, target: int, generator: np.random.Generator) -> Ids:
    """Return at least one sentence, from a random start, of a document other than `number`."""
    other = int(generator.integers(len(documents) - 1))
    document = documents[other + (other >= number)]
    start = int(generator.integers(len(document)))
    return _joined(document[start : max(_gather(document, start, target), start + 1)])


def _joined(sentences: Document) -> list[int]:
    return [token for sentence in sentences for token in sentence]
