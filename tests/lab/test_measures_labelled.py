"""Labelled texts as studies read them, and what needs no model."""

import gzip
import random
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer_lab.cells import Cell
from polyformer_lab.measures.texts import FEW, TEST, TRAIN, labelled, long_reviews, read_texts


def reviews(folder: Path, train: int = 60, test: int = 20) -> str:
    """Write texts whose label one word tells; every third has label 0."""
    chance = random.Random(0)
    for name, count in (("train", train), ("test", test)):
        lines = []
        for number in range(count):
            label = int(number % 3 > 0)
            words = [chance.choice("abcdefgh") * 3 for _ in range(number % 30 + 3)]
            lines.append(f"{label}\t{9 * label + 1}\t{' '.join([('poor', 'good')[label], *words])}\n")
        (folder / f"{name}.tsv.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return str(folder)


def test_texts_are_spread_over_the_file_and_cut(tmp_path: Path):
    source = reviews(tmp_path)
    own = {"source": source, "words": 5, "texts": 20, "tests": 1000, "few": 4}
    labelled(tmp_path, vocabulary=60, sets={"imdb": own})
    train, test, few = (read_texts(tmp_path / "imdb" / file) for file in (TRAIN, TEST, FEW))
    assert (len(train), len(test)) == (20, 20)
    assert max(len(text.split()) for text, _ in train) == 5
    assert {label for _, label in train} == {"0"}, "every third row of the file"
    assert few == train[::5]
    assert (tmp_path / "imdb" / "tokenizer.json").is_file()


def test_a_bag_of_words_reads_the_telling_word(tmp_path: Path):
    own = {"source": reviews(tmp_path), "words": 5, "texts": 60, "tests": 20}
    labelled(tmp_path, vocabulary=60, sets={"imdb": own})
    cell = Cell((), None, tmp_path / "cell", None, "bag-of-words", {"folder": str(tmp_path / "imdb")})
    (row,) = cell.run()
    assert row["test.accuracy"] > 0.9
    assert row["greater_class"] == 13 / 20


def test_only_long_reviews_are_chosen(tmp_path: Path):
    source = reviews(tmp_path, 12, 12)  # of 4 to 15 words, each a token
    words = (text for text in ["poor good", *(letter * 3 for letter in "abcdefgh")])
    build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=200), words).save(tmp_path)
    sizes = {"source": source, "encoder": str(tmp_path), "shortest": 12}
    out = tmp_path / "out"
    long_reviews(out, **sizes, texts=4, tests=2)
    assert [len(text.split()) for text, _ in read_texts(out / TRAIN)] == [12, 13, 14, 15]
    assert [len(text.split()) for text, _ in read_texts(out / TEST)] == [12, 14]
    with pytest.raises(InputError, match="tests: expected at most the 4 reviews of 12 tokens or more, got 5"):
        long_reviews(out, **sizes, texts=4, tests=5)
