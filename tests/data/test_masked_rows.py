"""Masks of rows: drawn anew or once for all epochs, and every kind of unit by its name."""

import re
from typing import Any

import numpy as np
import pytest
from chances import is_share

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.rows.masking import Masking, MaskingConfig

WORDS = ["[PAD]", "[MASK]", *(f"w{i}" for i in range(100))]
ROW = {"input_ids": np.arange(2, 102), "other": 1}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.of_words(WORDS)


def masking(tokenizer: Tokenizer, **options: Any) -> Masking:
    return Masking(MaskingConfig(**options), tokenizer, mask_id=1)


def test_a_dynamic_mask_follows_the_generator(tokenizer: Tokenizer):
    corrupt = masking(tokenizer).corrupt
    first, again, other = (corrupt(ROW, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert (first["labels"] == again["labels"]).all()
    assert (first["labels"] != other["labels"]).any()
    assert first["other"] == 1
    assert (ROW["input_ids"] == np.arange(2, 102)).all()


def test_static_masks_are_ten_and_stay(tokenizer: Tokenizer):
    """Liu et al. 2019, section 4.1: ten copies of every sequence, each masked in one way for good."""
    static = masking(tokenizer, static_copies=10)
    rows = static.copies([ROW, {**ROW, "input_ids": ROW["input_ids"][::-1]}])
    assert len(rows) == 20
    epochs = [
        [static.corrupt(row, np.random.default_rng([epoch, number])) for number, row in enumerate(rows)]
        for epoch in range(2)
    ]
    for before, after in zip(*epochs):
        assert (before["labels"] == after["labels"]).all()
        assert (before["input_ids"] == after["input_ids"]).all()
        assert "copy" not in before
    assert len({row["labels"].tobytes() for row in epochs[0]}) == 20


def test_the_masks_of_copies_are_as_random_as_others(tokenizer: Tokenizer):
    static = masking(tokenizer, static_copies=2000)
    rows = [static.corrupt(row, np.random.default_rng(0)) for row in static.copies([ROW])]
    counts = sum((row["labels"] != -100).astype(int) for row in rows)
    assert counts.sum() == 15 * 2000
    assert all(is_share(count, 2000, 0.15) for count in counts)


def test_without_copies_every_row_is_there_once(tokenizer: Tokenizer):
    assert masking(tokenizer).copies([ROW, ROW]) == [ROW, ROW]


def test_words_are_hidden_whole():
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    text = " one two three four five six seven eight nine ten"
    plain = {"input_ids": np.array(tokenizer.encode(text))}
    for seed in range(50):
        row = masking(tokenizer, unit="word", share=0.3).corrupt(plain, np.random.default_rng(seed))
        hidden = row["labels"] != -100
        assert hidden.any()
        for word in re.finditer(" [a-z]+", text):
            assert len(set(hidden[slice(*word.span())].tolist())) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "share: expected a share of the tokens in"),
        ({"random_share": 0.6, "kept_share": 0.6}, "random_share, kept_share: expected a sum of at most 1"),
        ({"longest": 0}, "longest: expected 1 unit or more"),
        ({"static_copies": -1}, "static_copies: expected 0 or more"),
    ],
)
def test_shares_and_counts_of_masks_out_of_range_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        MaskingConfig(**options)
