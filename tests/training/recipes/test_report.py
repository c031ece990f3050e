"""What a finished language model is set beside: tables, samples, and the n-gram baseline worked by hand."""

import math
import random

import pytest
import torch

from polyformer import InputError
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes.report import NGram, baselines, number, sample, table
from polyformer.training.tasks import LanguageModellingConfig

ROWS = [{"text": "abab\n"}, {"text": "abba\n"}]


def test_baselines_predict_what_the_model_predicts():
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    task = LanguageModellingConfig(ngram_order=2, row_length=16).build(tokenizer)
    (uniform, flat), (title, counted) = baselines(task, Splits(ROWS, ROWS[:1], None))  # type: ignore[arg-type]
    assert (uniform, title) == ("uniform", "2-gram (Kneser-Ney)")
    assert flat["perplexity"] == pytest.approx(260)
    assert flat["bits_per_byte"] == pytest.approx(math.log2(260) * 6 / 5)
    documents = task.rows.documents(ROWS)
    nats, tokens = NGram(documents, 2, 260).nats(documents[:1])
    assert counted["loss"] == pytest.approx(nats / tokens)
    held = task.rows.held_out(ROWS[:1])
    assert sum(task.objective.weight(batch) for _, batch in held.batches.epoch(0)) == tokens == 6


def test_no_baselines_unless_asked_for():
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    assert baselines(LanguageModellingConfig().build(tokenizer), Splits(ROWS, ROWS, None)) == []  # type: ignore[arg-type]


def test_a_sample_fits_the_positions_and_repeats():
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    task = LanguageModellingConfig(row_length=12, prompt="ab").build(tokenizer)
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("decoder-tiny", {"hidden_size": 16}))).eval()
    assert sample(task, model, seed=1).startswith("ab")
    assert sample(task, model, seed=1) == sample(task, model, seed=1)


def test_tables_are_aligned():
    lines = table([("one", {"loss": 1.5, "bits_per_byte": 0.25}), ("another", {"loss": 123456.0})]).split(
        "\n"
    )
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["loss", "bits", "per", "byte"]
    assert lines[2].split() == ["another", "123,456"]
    assert number(2 / 3) == "0.6667"


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
