"""Word vectors: three formats read alike, only what is asked for, and files that are damaged."""

import gzip
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.word_vectors import read_word_vectors, word_ids

WORDS = {
    "the": [0.5, -1.25, 3e-7],
    "thé": [1.0, 2.0, 3.0],
    ". . .": [7.0, 8.0, 9.0],
    "end": [0.0, -0.0, 1e30],
}
IDS = {"end": 5, "the": 2, "absent": 9, ". . .": 11}


def text(words: Iterable[tuple[str, list[float]]], header: str = "", space: str = "") -> bytes:
    lines = (f"{word} {' '.join(map(repr, vector))}{space}\n" for word, vector in words)
    return (header + "".join(lines)).encode()


def binary(words: Iterable[tuple[str, list[float]]], header: str, end: bytes = b"\n") -> bytes:
    rows = (word.encode() + b" " + np.array(vector, "<f4").tobytes() + end for word, vector in words)
    return header.encode() + b"".join(rows)


FILES = {
    "text": text(WORDS.items(), "4 3\n"),
    "trailing spaces": text(WORDS.items(), "4 3\n", " "),
    "glove": text(WORDS.items()),
    "gzipped": gzip.compress(text(WORDS.items(), "4 3\n")),
}
FILES |= {
    f"binary{i}": binary([(word, x) for word, x in WORDS.items() if " " not in word], "3 3\n", end)
    for i, end in enumerate((b"\n", b""))
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_read_alike(name: str, tmp_path: Path):
    file = tmp_path / "vectors"
    file.write_bytes(FILES[name])
    actual = read_word_vectors(file, IDS)
    expected = {IDS[word]: vector for word, vector in WORDS.items() if word in IDS}
    if name.startswith("binary"):
        del expected[11]  # a word ends at its first space
    assert actual.words == (3 if name.startswith("binary") else 4)
    assert sorted(actual.ids) == sorted(expected)
    for number, vector in zip(actual.ids, actual.vectors):
        assert np.array_equal(vector, np.array(expected[number], dtype=np.float32))


def test_rows_longer_than_any_buffer(tmp_path: Path):
    """Rows that lie across the parts in which a file is read, in both formats."""
    words = [
        (f"word{i}", np.random.default_rng(i).normal(size=3000).astype("<f4").tolist()) for i in range(200)
    ]
    for name, content in (("a", binary(words, "200 3000\n")), ("b", text(words, "200 3000\n"))):
        file = tmp_path / name
        file.write_bytes(content)
        actual = read_word_vectors(file, {"word0": 0, "word199": 1, "word87": 2})
        assert actual.ids.tolist() == [0, 2, 1]
        for vector, index in zip(actual.vectors, (0, 87, 199), strict=True):
            assert vector.tolist() == words[index][1]


ROWS = [("the", [1.0, 2.0]), ("end", [3.0, 4.0])]
BAD = {
    "empty": (b"", "empty; expected word vectors"),
    "blank": (b"\n", "empty; expected word vectors"),
    "no header": (b"\x89PNG\r\n", "expected 'COUNT WIDTH' .word2vec. or a word and its numbers"),
    "prose": (b"once upon a time\n", "expected 'COUNT WIDTH'"),
    "no words": (b"0 5\n", "a header of 0 words and 5 numbers each"),
    "no width": (b"5 0\n", "a header of 5 words and 0 numbers each"),
    "huge": (b"5 99999999999999999999999\n", "a header of 5 words and 99999999999999999999 numbers"),
    "short text": (text(ROWS, "3 2\n"), "cut short: 2 rows of the 3 that its header says"),
    "short row": (text(ROWS, "2 2\n")[:-5], "expected a word and 2 numbers in row 2, got 2 fields"),
    "wide header": (text(ROWS, "2 3\n"), "expected a word and 3 numbers in row 1"),
    "long text": (text(ROWS, "1 2\n"), "a wrong header: more rows than the 1 that it says"),
    "short binary": (binary(ROWS, "2 2\n")[:-4], "cut short in row 2 of the 2 that its header says"),
    "binary of few rows": (binary(ROWS, "3 2\n"), "cut short in row 3 of the 3"),
    "long binary": (binary(ROWS, "1 2\n"), "a wrong header: more rows than the 1"),
    "nan": (text([("the", [1.0, float("nan")])], "1 2\n"), "a number of 'the' is not finite"),
    "infinity": (binary([("the", [float("inf"), 1.0])], "1 2\n"), "a number of 'the' is not finite"),
    "no number": (b"1 2\nthe 1.0 x\n", "expected numbers in row 1, got b'1.0 x'"),
    "twice": (text([*ROWS, ROWS[0]], "3 2\n"), "the word 'the' occurs twice"),
    "latin": (b"1 2\nth\xe9 1.0 2.0\n", "the word of row 1, .* is no UTF-8"),
    "strangers": (text([("other", [1.0])], "1 1\n"), "none of its 1 words is a token"),
    "cut gzip": (gzip.compress(text(ROWS, "2 2\n"))[:-9], "truncated: the gzip file ends too early"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_are_refused(name: str, tmp_path: Path):
    content, message = BAD[name]
    file = tmp_path / "vectors"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_word_vectors(file, {"the": 0, "end": 1, "absent": 2})
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_an_absent_file_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read"):
        read_word_vectors(tmp_path / "absent", {"the": 0})


TEXTS = ["the end of the story, the end", "ends and means, the thé is an end"] * 5


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_whole_words_are_tokens_by_their_marks(algorithm: str):
    """The id of a word is the one that stands for it in a text, and not the same letters inside a word."""
    size = {"wordpiece": 60, "bpe": 320, "unigram": 36}[algorithm]
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm=algorithm, vocab_size=size), TEXTS)
    ids = word_ids(tokenizer)
    assert tokenizer.encode("and end and").count(ids["end"]) == 1
    assert not set(ids.values()) & tokenizer.special_ids
    assert not any(mark in word for word in ids for mark in ("##", "\u2581", "\u0120", " "))


def test_tokens_that_are_words():
    ids = word_ids(Tokenizer.of_words(["<pad>", "the", "thé", "end"]))
    assert ids == {"the": 1, "thé": 2, "end": 3}
