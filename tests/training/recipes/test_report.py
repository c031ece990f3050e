"""What a finished language model is set beside."""

import math

import pytest
import torch

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
    documents = task.documents(ROWS)
    nats, tokens = NGram(documents, 2, 260).nats(documents[:1])
    assert counted["loss"] == pytest.approx(nats / tokens)
    held = task.held_out(ROWS[:1])
    assert sum(task.weight(batch) for _, batch in held.batches.epoch(0)) == tokens == 6


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
