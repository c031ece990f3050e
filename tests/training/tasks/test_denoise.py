"""Denoising and span corruption as tasks: what is read and what is written, room, and that they learn."""

import numpy as np
import pytest
from fitted import learned

from polyformer import InputError
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.data.rows.noising import NoiseConfig
from polyformer.models.presets import model_config
from polyformer.training.tasks import (
    Denoising,
    DenoisingConfig,
    SpanCorruption,
    SpanCorruptionConfig,
    TaskWithData,
)

ROWS = [{"text": "one thing. and two."}, {"text": "a longer text than a row is, which is cut."}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


def build(tokenizer: Tokenizer, **options) -> Denoising:
    return DenoisingConfig(**{"row_length": 24, "batch_tokens": 96, **options}).build(tokenizer)


def test_rows(tokenizer: Tokenizer):
    task = build(tokenizer)
    rows = task.rows.prepare(ROWS)
    assert [len(row["input_ids"]) for row in rows] == [21, 24, 22]
    texts = [tokenizer.decode(row["input_ids"][1:-1].tolist()) for row in rows]
    assert texts == [ROWS[0]["text"], ROWS[1]["text"][:22], ROWS[1]["text"][22:]]
    for row in rows:
        assert (row["input_ids"][0], row["input_ids"][-1]) == (task.rows.bos, task.rows.eos)


def test_the_target_is_the_text_whatever_noise_the_encoder_reads(tokenizer: Tokenizer):
    task = build(tokenizer)
    plain = task.rows.prepare(ROWS)[0]
    for seed in range(20):
        row = task.rows.corrupt(plain, np.random.default_rng(seed))
        assert tokenizer.decode(row["labels"][:-1].tolist()) == ROWS[0]["text"]
        assert row["labels"][-1] == task.rows.eos
        assert (row["input_ids"][0], row["input_ids"][-1]) == (task.rows.bos, task.rows.eos)
        assert (row["input_ids"] == task.rows.mask).any()
        assert len(row["input_ids"]) <= 24


def test_sentences_move(tokenizer: Tokenizer):
    task = build(tokenizer, noise=NoiseConfig(infill=0.0))
    plain = task.rows.prepare(ROWS)[0]
    read = {
        tokenizer.decode(task.rows.corrupt(plain, np.random.default_rng(seed))["input_ids"].tolist())
        for seed in range(20)
    }
    assert read == {"one thing. and two.", " and two.one thing."}


def test_a_text_that_grows_loses_its_end(tokenizer: Tokenizer):
    task = build(tokenizer, noise=NoiseConfig(permute=False, mean_span=0.05))
    row = task.rows.corrupt(task.rows.prepare(ROWS)[1], np.random.default_rng(0))
    assert len(row["input_ids"]) == 24
    assert row["input_ids"][-1] == task.rows.eos


def test_a_model_learns_to_restore_a_noisy_text(tokenizer: Tokenizer):
    before, after = learned(
        build(tokenizer), model_config("transformer-tiny", {"block": "pre"}), ROWS, steps=60, lr=1e-2
    )
    assert before["loss"] > 5
    assert after["loss"] < 1


def test_short_rows_and_texts_without_sentence_ends_are_refused(tokenizer: Tokenizer, tmp_path):
    with pytest.raises(InputError, match="row_length: expected 3 or more"):
        DenoisingConfig(row_length=2)
    words = Tokenizer.of_words(["<pad>", "<s>", "</s>", "<mask>", "word"])
    with pytest.raises(InputError, match="tokenizer: none of its tokens ends in"):
        DenoisingConfig().build(words)
    assert DenoisingConfig(noise=NoiseConfig(permute=False)).build(words).rows.ends is None


SPAN_ROWS = [
    {"text": "some text to take spans of."},
    {"text": "and a second document, which follows the first one."},
]
CONFIG = SpanCorruptionConfig(row_length=24, batch_tokens=96, density=0.3)


@pytest.fixture(scope="module")
def with_sentinels() -> Tokenizer:
    return CONFIG.tokenizer(TokenizerConfig(algorithm="bytes"), SPAN_ROWS)


@pytest.fixture(scope="module")
def task(with_sentinels: Tokenizer) -> SpanCorruption:
    task = CONFIG.build(with_sentinels)
    assert isinstance(task, SpanCorruption)
    return task


def test_a_tokenizer_gets_sentinels(with_sentinels: Tokenizer):
    assert len(with_sentinels) == 260 + 100
    assert (
        len(
            SpanCorruptionConfig(row_length=4096, batch_tokens=8192).tokenizer(
                TokenizerConfig(algorithm="bytes"), []
            )
        )
        > 360
    )


def test_documents_are_laid_end_to_end(task: SpanCorruption):
    rows = task.rows.prepare_held_out(SPAN_ROWS)
    joined = np.concatenate([row["input_ids"] for row in rows]).tolist()
    assert task.tokenizer.decode(joined) == SPAN_ROWS[0]["text"] + SPAN_ROWS[1]["text"]
    assert {len(row["input_ids"]) for row in rows[:-1]} == {CONFIG.text_length}
    assert len(rows[-1]["input_ids"]) < CONFIG.text_length
    assert len(task.rows.prepare(SPAN_ROWS)) == len(rows) - 1


def test_batches_have_no_padding(task: SpanCorruption):
    fitting = TaskWithData(task, Splits(SPAN_ROWS * 5, None, None), seed=0)  # type: ignore[arg-type]
    epochs = [list(fitting.batches(epoch, 0, 0, 1)) for epoch in (0, 1)]
    for batches in epochs:
        for batch in batches:
            assert batch["input_ids"].shape[1] == 24
            assert batch["attention_mask"].all()
            assert (batch["labels"] != -100).all()
            assert (batch["input_ids"][:, -1] == task.rows.eos).all()
    first, second = (sorted(row for batch in epoch for row in batch["labels"].tolist()) for epoch in epochs)
    assert first != second


def test_positions_hold_input_and_target(with_sentinels: Tokenizer):
    assert CONFIG.build(with_sentinels).architecture.positions == 24
    assert SpanCorruptionConfig(row_length=24, density=0.8).build(with_sentinels).architecture.positions > 24


def test_without_bos_what_is_written_starts_from_pad():
    words = Tokenizer.of_words(["<pad>", "</s>", *(f"<extra_id_{i}>" for i in range(3)), "a"])
    assert CONFIG.build(words).adapt(model_config("transformer-tiny")).special.bos == 0
    unpadded = Tokenizer.of_words(["</s>", *(f"<extra_id_{i}>" for i in range(3)), "a"])
    with pytest.raises(InputError, match="tokenizer: it has no <bos> or <pad> token"):
        CONFIG.build(unpadded).adapt(model_config("transformer-tiny"))


def test_a_model_learns_the_missing_spans(task: SpanCorruption):
    rows = [{"text": "abcdefghijkl" * 40}]
    before, after = learned(
        task, model_config("transformer-tiny", {"block": "pre"}), rows, steps=130, lr=1e-2
    )
    assert before["loss"] > 5
    assert after["loss"] < 1.6  # twelve letters alone are 2.5 nats


def test_spans_that_do_not_fit_are_refused(with_sentinels: Tokenizer):
    plain = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    with pytest.raises(InputError, match=r"tokenizer: expected 3 sentinels <extra_id_0>.*, got 0"):
        CONFIG.build(plain)
