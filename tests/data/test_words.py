"""Where words begin and sentences end, as the pieces of every kind of tokenizer tell it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.rows.masking import sentence_ends, word_starts
from polyformer.data.tokenizers import load_tokenizer

TEXTS = ["hello world, this is a small text. unbelievable!"] * 5


def marked(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text's words: its pieces, joined where none begins."""
    starts, words = word_starts(tokenizer), []
    for number in tokenizer.encode(text):
        piece = tokenizer.backend.id_to_token(number)
        if starts[number] or not words:
            words.append(piece)
        else:
            words[-1] += piece
    return words


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("bytes", ["hello", "Ġworlds,", "Ġis", "Ġsmall."]),
        ("bpe", ["hello", "Ġworlds,", "Ġis", "Ġsmall."]),
        ("wordpiece", ["hello", "world##s", ",", "is", "small", "."]),
        ("unigram", ["\u2581hello", "\u2581worlds,", "\u2581is", "\u2581small."]),
    ],
)
def test_words(algorithm: str, expected: list[str]):
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm=algorithm, vocab_size=400), TEXTS)  # type: ignore[arg-type]
    assert marked(tokenizer, "hello worlds, is small.") == expected
    assert all(word_starts(tokenizer)[number] for number in tokenizer.special_ids)
    ends = sentence_ends(tokenizer)
    last_characters = [tokenizer.backend.id_to_token(int(number))[-1] for number in ends]
    assert set(last_characters) <= set(".!?")
    assert tokenizer.encode("a.")[-1] in ends


def test_tokens_without_marks_are_words_and_end_no_sentence():
    tokenizer = Tokenizer.of_words(["[PAD]", "one", "two"])
    assert word_starts(tokenizer).all()
    with pytest.raises(InputError, match="none of its tokens ends in"):
        sentence_ends(tokenizer)


def test_pieces_that_mark_the_ends_of_words():
    tokenizer = Tokenizer.of_words(["[PAD]", "wor", "ld</w>", ".</w>"])
    assert sentence_ends(tokenizer).tolist() == [3]
    with pytest.raises(InputError, match="tokenizer: its pieces mark where words end"):
        word_starts(tokenizer)


def test_the_vocabularies_of_bert_and_gpt2(shared_data: Callable[[str], Path]):
    folder = shared_data("tokenizers")
    bert = load_tokenizer(folder / "bert-base-uncased-vocab.txt")
    assert marked(bert, "An embedding, here.") == ["an", "em##bed##ding", ",", "here", "."]
    gpt2 = load_tokenizer(folder / "gpt2-encoder.json", merges=folder / "gpt2-vocab.bpe")
    assert marked(gpt2, "An embedding, here.") == ["An", "Ġembedding,", "Ġhere."]
