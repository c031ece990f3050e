"""Sentence pairs as BERT and ALBERT make them: by hand, by count, and cut a token at a time."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from chances import are_shares, is_share

from polyformer.core.errors import InputError
from polyformer.data.rows.structured import (
    Pair,
    cut_pair,
    next_sentence_pairs,
    pair_row,
    sentence_order_pairs,
)


class Script:
    """A generator that returns scripted values in turn."""

    def __init__(self, random: Sequence[float], integers: Sequence[int]):
        self.left = {"random": list(random), "integers": list(integers)}

    def binomial(self, tokens: int, share: float) -> int:
        assert (tokens, share) == (0, 0.5), "nothing is cut where it speaks"
        return 0

    def random(self) -> float:
        return self.left["random"].pop(0)

    def integers(self, *bounds: int) -> int:
        value = self.left["integers"].pop(0)
        assert value in range(*bounds), (value, bounds)
        return value


def corpus(documents: int, sentences: int, tokens: int) -> list[list[list[int]]]:
    """Token ids that tell where they stand: 1000 * document + 10 * sentence + place."""
    return [
        [[1000 * d + 10 * s + t for t in range(tokens)] for s in range(sentences)] for d in range(documents)
    ]


def test_next_sentences_by_hand():
    documents = [[[1], [2], [3], [4]], [], [[7, 8], [9]]]
    script: Any = Script(
        random=[0.5, 0.5, 0.5, 0.49],  # not short, next; not short, random
        # [1 2 3] cut behind 1; behind the lone [4] the only other document from its second sentence on;
        # [7 8 9] cut behind 8, and from the other document's third sentence; the same for [9], its first
        integers=[1, 0, 1, 1, 0, 2, 0, 0],
    )
    assert list(next_sentence_pairs(documents, script, length=3)) == [
        Pair([1], [2, 3], 0),
        Pair([4], [9], 1),
        Pair([7, 8], [3], 1),  # one token is enough
        Pair([9], [1, 2], 1),  # what was put back
    ]


def test_sentence_order_by_hand():
    script: Any = Script(random=[0.5, 0.5, 0.4, 0.5], integers=[1, 2])
    pairs = list(sentence_order_pairs([[[1], [2], [3], [4], [5], [6], [7]], [[8, 9, 9]]], script, length=3))
    # [1 2 3] cut behind 1 and kept, [4 5 6] cut behind 5 and swapped; 7 and the second document are alone
    assert pairs == [Pair([1], [2, 3], 0), Pair([6], [4, 5], 1)]


def test_half_of_the_second_segments_are_next():
    documents = corpus(40, 30, 5)
    pairs = [
        pair
        for seed in range(20)
        for pair in next_sentence_pairs(documents, np.random.default_rng(seed), length=20, short_share=0)
    ]
    # A last sentence that is left alone is always followed by another document's.
    choice = [pair for pair in pairs if pair.first[0] % 1000 != 290]
    assert is_share(sum(pair.label for pair in choice), len(choice), 0.5)
    for pair in pairs:
        same = pair.first[0] // 1000 == pair.second[0] // 1000
        assert same == (pair.label == 0)
        assert len(pair.first) + len(pair.second) <= 20
        if pair.label == 0:  # 3 + 2 sentences, say, are cut from either end of either segment
            assert pair.second[0] // 10 > pair.first[-1] // 10


def test_random_segments_come_from_everywhere_else():
    documents = [[[10 * d + s] for s in range(4)] for d in range(5)]
    starts = Counter(
        (pair.first[0] // 10, pair.second[0])
        for seed in range(600)
        for pair in next_sentence_pairs(documents, np.random.default_rng(seed), length=2, short_share=0)
        if pair.label
    )
    for d in range(5):
        counts = [starts[d, 10 * other + s] for other in range(5) if other != d for s in range(4)]
        assert are_shares(counts, [1] * 16)
        assert not any(starts[d, 10 * d + s] for s in range(4))


def test_nothing_of_a_document_is_lost():
    """Put back what a random segment replaces, every sentence is in some pair (none is cut here)."""
    documents = corpus(3, 10, 2)
    for seed in range(20):
        pairs = list(next_sentence_pairs(documents, np.random.default_rng(seed), length=8, short_share=0))
        own = [pair.first for pair in pairs] + [pair.second for pair in pairs if not pair.label]
        assert sorted(token for ids in own for token in ids) == sorted(np.ravel(documents).tolist())


def test_a_tenth_of_the_documents_has_short_pairs():
    documents = corpus(1000, 10, 1)
    pairs = sentence_order_pairs(documents, np.random.default_rng(0), length=10)
    lengths: dict[int, int] = {}
    for pair in pairs:
        lengths.setdefault(pair.first[0] // 1000, len(pair.first) + len(pair.second))
    short = [length for length in lengths.values() if length < 10]
    assert is_share(len(short), 1000, 0.1 * 8 / 9)  # 10 % draw a length of 2 to 10, of which 10 is not short


def test_short_pairs_have_any_length():
    pairs = sentence_order_pairs(corpus(1000, 10, 1), np.random.default_rng(0), length=10, short_share=1.0)
    lengths: dict[int, int] = {}
    for pair in pairs:
        lengths.setdefault(pair.first[0] // 1000, len(pair.first) + len(pair.second))
    assert are_shares([list(lengths.values()).count(n) for n in range(2, 11)], [1] * 9)


def test_half_of_the_orders_are_swapped():
    documents = corpus(300, 40, 3)
    pairs = [
        pair
        for seed in range(3)
        for pair in sentence_order_pairs(documents, np.random.default_rng(seed), length=24)
    ]
    assert is_share(sum(pair.label for pair in pairs), len(pairs), 0.5)
    for pair in pairs:
        assert pair.first[0] // 1000 == pair.second[0] // 1000
        assert (pair.first[0] < pair.second[0]) == (pair.label == 0)


def test_every_cut_between_sentences_is_as_likely():
    pairs = [
        next(sentence_order_pairs(corpus(1, 5, 1), np.random.default_rng(seed), length=5, short_share=0))
        for seed in range(4000)
    ]
    counts = Counter(len(pair.second if pair.label else pair.first) for pair in pairs)
    assert are_shares([counts[n] for n in (1, 2, 3, 4)], [1] * 4)


def slowly(first: int, second: int, length: int) -> tuple[int, int]:
    """Lengths when the longer loses a token at a time, the second where both are equal."""
    while first + second > length:
        first, second = (first - 1, second) if first > second else (first, second - 1)
    return first, second


@pytest.mark.parametrize("length", [2, 5, 8, 13])
def test_cutting_gives_the_lengths_of_one_token_at_a_time(length: int):
    generator = np.random.default_rng(0)
    for first in range(1, 15):
        for second in range(1, 15):
            a, b = cut_pair(range(first), range(20, 20 + second), length, generator)
            assert (len(a), len(b)) == slowly(first, second, length)
            assert list(a) == list(range(a[0], a[0] + len(a)))
            assert list(b) == list(range(b[0], b[0] + len(b)))


def test_front_and_back_are_cut_alike():
    cuts = [cut_pair(range(8), [9], 5, np.random.default_rng(seed))[0][0] for seed in range(4000)]
    assert are_shares([cuts.count(n) for n in range(5)], [1, 4, 6, 4, 1])  # four tokens, each from either end


def test_a_row():
    assert pair_row(Pair([5, 6], [7], 1), cls_id=1, sep_id=2) == {
        "input_ids": [1, 5, 6, 2, 7, 2],
        "token_type_ids": [0, 0, 0, 0, 1, 1],
        "sentence_labels": 1,
    }


def test_a_single_document_and_short_pairs_are_refused():
    generator = np.random.default_rng(0)
    with pytest.raises(
        InputError, match="documents: expected two or more with text in them, got 1; a plain text"
    ):
        list(next_sentence_pairs([[[1]], [[]]], generator, length=4))
    with pytest.raises(InputError, match="length: expected 2 tokens or more for a pair, got 1"):
        list(sentence_order_pairs([], generator, length=1))
    with pytest.raises(InputError, match=r"short_share: expected a share in \[0, 1\], got 2"):
        list(sentence_order_pairs([], generator, length=5, short_share=2))
