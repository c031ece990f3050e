"""Denoising as a task: what is read and what is written, room, and that it learns."""

import numpy as np
import pytest
from fitted import learned

from polyformer import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.rows.noising import NoiseConfig
from polyformer.models.presets import model_config
from polyformer.training.tasks import Denoising, DenoisingConfig

ROWS = [{"text": "one thing. and two."}, {"text": "a longer text than a row is, which is cut."}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


def build(tokenizer: Tokenizer, **options) -> Denoising:
    return DenoisingConfig(**{"row_length": 24, "batch_tokens": 96, **options}).build(tokenizer)


def test_rows(tokenizer: Tokenizer):
    task = build(tokenizer)
    rows = task.prepare(ROWS)
    assert [len(row["input_ids"]) for row in rows] == [21, 24, 22]
    texts = [tokenizer.decode(row["input_ids"][1:-1].tolist()) for row in rows]
    assert texts == [ROWS[0]["text"], ROWS[1]["text"][:22], ROWS[1]["text"][22:]]
    for row in rows:
        assert (row["input_ids"][0], row["input_ids"][-1]) == (task.bos, task.eos)


def test_what_is_written_is_the_text_whatever_is_read(tokenizer: Tokenizer):
    task = build(tokenizer)
    plain = task.prepare(ROWS)[0]
    for seed in range(20):
        row = task.corrupt(plain, np.random.default_rng(seed))
        assert tokenizer.decode(row["labels"][:-1].tolist()) == ROWS[0]["text"]
        assert row["labels"][-1] == task.eos
        assert (row["input_ids"][0], row["input_ids"][-1]) == (task.bos, task.eos)
        assert (row["input_ids"] == task.mask).any()
        assert len(row["input_ids"]) <= 24


def test_sentences_move(tokenizer: Tokenizer):
    task = build(tokenizer, noise=NoiseConfig(infill=0.0))
    plain = task.prepare(ROWS)[0]
    read = {
        tokenizer.decode(task.corrupt(plain, np.random.default_rng(seed))["input_ids"].tolist())
        for seed in range(20)
    }
    assert read == {"one thing. and two.", " and two.one thing."}


def test_a_text_that_grows_loses_its_end(tokenizer: Tokenizer):
    task = build(tokenizer, noise=NoiseConfig(permute=False, mean_span=0.05))
    row = task.corrupt(task.prepare(ROWS)[1], np.random.default_rng(0))
    assert len(row["input_ids"]) == 24
    assert row["input_ids"][-1] == task.eos


def test_it_learns(tokenizer: Tokenizer):
    before, after = learned(
        build(tokenizer), model_config("transformer-tiny", {"block": "pre"}), ROWS, steps=60, lr=1e-2
    )
    assert before["loss"] > 5
    assert after["loss"] < 1


def test_refuses(tokenizer: Tokenizer, tmp_path):
    with pytest.raises(InputError, match="row_length: expected 3 or more"):
        DenoisingConfig(row_length=2)
    words = Tokenizer.of_words(["<pad>", "<s>", "</s>", "<mask>", "word"])
    with pytest.raises(InputError, match="tokenizer: none of its tokens ends in"):
        DenoisingConfig().build(words)
    assert DenoisingConfig(noise=NoiseConfig(permute=False)).build(words).ends is None
