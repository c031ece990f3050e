"""Span corruption as a task: rows without padding, a tokenizer with sentinels, and that it learns."""

import numpy as np
import pytest
from fitted import learned

from polyformer import InputError
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.models.presets import model_config
from polyformer.training.tasks import SpanCorruption, SpanCorruptionConfig, TaskWithData

ROWS = [
    {"text": "some text to take spans of."},
    {"text": "and a second document, which follows the first one."},
]
CONFIG = SpanCorruptionConfig(row_length=24, batch_tokens=96, density=0.3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return CONFIG.tokenizer(TokenizerConfig(algorithm="bytes"), ROWS)


@pytest.fixture(scope="module")
def task(tokenizer: Tokenizer) -> SpanCorruption:
    task = CONFIG.build(tokenizer)
    assert isinstance(task, SpanCorruption)
    return task


def test_a_tokenizer_gets_sentinels(tokenizer: Tokenizer):
    assert len(tokenizer) == 260 + 100
    assert (
        len(
            SpanCorruptionConfig(row_length=4096, batch_tokens=8192).tokenizer(
                TokenizerConfig(algorithm="bytes"), []
            )
        )
        > 360
    )


def test_documents_are_laid_end_to_end(task: SpanCorruption):
    rows = task.prepare_held_out(ROWS)
    joined = np.concatenate([row["input_ids"] for row in rows]).tolist()
    assert task.tokenizer.decode(joined) == ROWS[0]["text"] + ROWS[1]["text"]
    assert {len(row["input_ids"]) for row in rows[:-1]} == {CONFIG.text_length}
    assert len(rows[-1]["input_ids"]) < CONFIG.text_length
    assert len(task.prepare(ROWS)) == len(rows) - 1


def test_batches_have_no_padding(task: SpanCorruption):
    fitting = TaskWithData(task, Splits(ROWS * 5, None, None), seed=0)  # type: ignore[arg-type]
    epochs = [list(fitting.batches(epoch, 0, 0, 1)) for epoch in (0, 1)]
    for batches in epochs:
        for batch in batches:
            assert batch["input_ids"].shape[1] == 24
            assert batch["attention_mask"].all()
            assert (batch["labels"] != -100).all()
            assert (batch["input_ids"][:, -1] == task.eos).all()
    first, second = (sorted(row for batch in epoch for row in batch["labels"].tolist()) for epoch in epochs)
    assert first != second


def test_positions_hold_input_and_target(tokenizer: Tokenizer):
    assert CONFIG.build(tokenizer).positions == 24
    assert SpanCorruptionConfig(row_length=24, density=0.8).build(tokenizer).positions > 24


def test_without_bos_what_is_written_starts_from_pad():
    words = Tokenizer.of_words(["<pad>", "</s>", *(f"<extra_id_{i}>" for i in range(3)), "a"])
    assert CONFIG.build(words).adapt(model_config("transformer-tiny")).special.bos == 0
    unpadded = Tokenizer.of_words(["</s>", *(f"<extra_id_{i}>" for i in range(3)), "a"])
    with pytest.raises(InputError, match="tokenizer: it has no <bos> or <pad> token"):
        CONFIG.build(unpadded).adapt(model_config("transformer-tiny"))


def test_it_learns(task: SpanCorruption):
    rows = [{"text": "abcdefghijkl" * 40}]
    before, after = learned(
        task, model_config("transformer-tiny", {"block": "pre"}), rows, steps=130, lr=1e-2
    )
    assert before["loss"] > 5
    assert after["loss"] < 1.6  # twelve letters alone are 2.5 nats


def test_refuses(tokenizer: Tokenizer):
    plain = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    with pytest.raises(InputError, match=r"tokenizer: expected 3 sentinels <extra_id_0>.*, got 0"):
        CONFIG.build(plain)
    with pytest.raises(InputError, match="density: expected a share of the tokens"):
        SpanCorruptionConfig(density=0.0)
    with pytest.raises(
        InputError, match=r"batch_tokens: expected the tokens of a text before .*, 141, or more"
    ):
        SpanCorruptionConfig(batch_tokens=130)
