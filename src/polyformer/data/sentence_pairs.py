"""Pairs of text segments from documents, to predict whether the second follows the first, or their order.

A document is a list of sentences, a sentence a list of token ids. Sentences are collected up to `length`
tokens and split in two after one of them, which gives a pair:

    label  next_sentence_pairs              sentence_order_pairs
    0      A, and B that follows it         A, and B that follows it
    1      A, and a piece of another text   B, and A that precedes it

For `short_share` of the documents fewer tokens are collected, 2 to `length` with equal probability. All
functions are pure in the documents and the generator.

Source: Devlin et al. 2019 (BERT), section 3.1, task 2, and appendix A.2, with the choices of the released
create_pretraining_data.py; Lan et al. 2020 (ALBERT), section 3.1, and section 4.1 for the share of 10 %.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.pairs import Ids, Pair, cut_pair

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
