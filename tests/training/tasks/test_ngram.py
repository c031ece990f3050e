"""The n-gram baseline against examples worked by hand, and as a distribution."""

import math
import random

import pytest

from polyformer import InputError
from polyformer.training.recipes.report import NGram


def test_bigrams_worked_by_hand():
    # N of (0 1) is 2, of (1 2) and (1 3) 1: D = 2 / (2 + 2). Each of 1, 2, 3 follows one token: D = 3 / 3,
    # so that P_1 = 1/4 for all four tokens.
    model = NGram([[0, 1, 2], [0, 1, 3]], order=2, vocab_size=4)
    assert model.probability(1, [0]) == pytest.approx((2 - 0.5 + 0.5 * 1 / 4) / 2)
    assert model.probability(2, [0, 1]) == pytest.approx((1 - 0.5 + 0.5 * 2 / 4) / 2)
    assert model.probability(0, [0, 1]) == pytest.approx(0.5 * 2 / 4 / 2)


def test_trigrams_worked_by_hand():
    # Trigrams: four, each once: D_3 = 1. Bigrams stand after: (1 2) two tokens, (2 1) and (2 3) one; (0 1)
    # begins the document once: D_2 = 3 / 5. Single tokens follow: 1 two, 2 and 3 one: D_1 = 2 / 4.
    model = NGram([[0, 1, 2, 1, 2, 3]], order=3, vocab_size=4)
    unigram = {0: 0.375 / 4, 1: (1.5 + 0.375) / 4, 2: (0.5 + 0.375) / 4, 3: (0.5 + 0.375) / 4}
    assert model.probability(2, [9]) == pytest.approx(unigram[2])  # after an unseen context
    assert model.probability(1, [0]) == pytest.approx(0.4 + 0.6 * unigram[1])
    assert model.probability(2, [0, 1]) == pytest.approx((1.4 + 0.6 * unigram[2]) / 2)
    assert model.probability(1, [0, 1, 2]) == pytest.approx((0.4 + 0.6 * 2 * unigram[1]) / 2)
    assert model.probability(3, [1, 2]) == pytest.approx((0.4 + 0.6 * 2 * unigram[3]) / 2)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_sum_to_one_after_any_context(order: int):
    generator = random.Random(order)
    texts = [[0, *generator.choices(range(1, 7), k=generator.randrange(1, 30))] for _ in range(20)]
    model = NGram(texts, order, vocab_size=9)
    for context in ([0], [0, 3], [0, 3, 1, 4], [1, 2, 3, 4, 5], [8, 8]):
        probabilities = [model.probability(token, context) for token in range(9)]
        assert sum(probabilities) == pytest.approx(1)
        assert min(probabilities) > 0


def test_nats_are_of_every_token_but_the_first():
    model = NGram([[0, 1, 2], [0, 1, 3]], order=2, vocab_size=4)
    nats, tokens = model.nats([[0, 1, 2], [0, 3]])
    expected = -sum(math.log(model.probability(*event)) for event in ((1, [0]), (2, [0, 1]), (3, [0])))
    assert tokens == 3
    assert nats == pytest.approx(expected)


def test_short_documents_and_long_orders():
    model = NGram([[0, 1]], order=5, vocab_size=2)  # every n-gram once, D = 1: all falls to P_0
    assert model.nats([[0, 1]]) == (pytest.approx(math.log(2)), 1)


def test_order_is_checked():
    with pytest.raises(InputError, match="order: expected 1 or more, got 0"):
        NGram([[0, 1]], order=0, vocab_size=2)
