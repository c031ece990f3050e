"""Sentinels of a tokenizer: T5's order, and added only where they are missing."""

import pytest

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.rows.noising import add_sentinels, sentinel_ids
from polyformer.data.tokenizers import load_tokenizer


@pytest.mark.parametrize("algorithm", ["bytes", "bpe", "wordpiece", "unigram"])
def test_they_stand_behind_all_others_the_first_last(algorithm):
    plain = Tokenizer.train(TokenizerConfig(algorithm=algorithm, vocab_size=300), ["a few words of text"] * 3)
    size = len(plain)
    tokenizer = add_sentinels(plain, 10)
    assert len(plain) == size
    assert sentinel_ids(tokenizer, 10) == list(range(size + 9, size - 1, -1))
    assert set(sentinel_ids(tokenizer, 10)) <= tokenizer.special_ids
    assert tokenizer.encode("a few words") == plain.encode("a few words")
    assert tokenizer.eos_id == plain.eos_id
    assert add_sentinels(tokenizer, 10) is tokenizer
    assert len(add_sentinels(tokenizer, 12)) == size + 12
    text = "<extra_id_0>"
    assert not set(tokenizer.encode(text)) & set(sentinel_ids(tokenizer, 10))  # text is text


def test_they_are_saved(tmp_path):
    tokenizer = add_sentinels(Tokenizer.train(TokenizerConfig(algorithm="bytes"), []), 3)
    tokenizer.save(tmp_path)
    assert sentinel_ids(load_tokenizer(tmp_path), 3) == [262, 261, 260]


def test_too_few_are_named():
    tokenizer = add_sentinels(Tokenizer.train(TokenizerConfig(algorithm="bytes"), []), 3)
    with pytest.raises(
        InputError, match=r"tokenizer: expected 5 sentinels <extra_id_0>.*, got 3; .*leave such parts out"
    ):
        sentinel_ids(tokenizer, 5)
