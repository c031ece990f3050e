"""Texts that studies prepare: documents, labelled texts and pairs of them, and texts behind control codes."""

import gzip
import json
import random
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.data.formats import readers as formats
from polyformer_lab.cells import Cell
from polyformer_lab.measures import texts
from polyformer_lab.measures.control_codes import CODES, LENGTH, Judge, by_code, coded_documents
from polyformer_lab.measures.texts import (
    FEW,
    SPLITS,
    TEST,
    TRAIN,
    labelled,
    labelled_pairs,
    long_reviews,
    opening_sentences,
    opposites,
    read_texts,
)

BOOK = "".join(f"Line {i} of the book, and all was quiet.\n" for i in range(400))


def test_a_book_is_cut_at_a_line_and_freed_of_what_is_not_the_book(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (formats, texts):
        monkeypatch.setattr(module, "PIECE", 4000)
    file = tmp_path / "book.txt"
    windows = BOOK.replace("\n", "\r\n")
    file.write_bytes(f"\ufeffLicence\r\n*** START OF IT ***\r\n{windows}*** END OF IT ***\r\nL".encode())
    texts.documents(tmp_path, str(file))
    train, held = (
        [json.loads(line)["text"] for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in texts.SPLITS
    )
    assert "".join(train + held) == BOOK
    assert held[0].startswith("Line 381 ")
    file.write_text("".join(train))
    assert train == [row["text"] for row in formats.read_text(file)]
    assert len(train) == 4
    file.write_text("no line")
    with pytest.raises(InputError, match="too short a book to hold out the last twentieth"):
        texts.documents(tmp_path, str(file))


def test_the_summary_of_a_paragraph_is_its_first_sentence(tmp_path: Path):
    lines = (
        " = A title . of words here = ",
        " It ran from No. 1 to 3 . Then it rested . It slept . ",
        " A paragraph of a single sentence . ",
        f" {'Long ' * 25} . It rested . ",
        " Too short . It rested for long . ",
        " It ran for a day . It rested . ",
    )
    for file in ("train", "valid"):
        (tmp_path / f"{file}.txt.gz").write_bytes(gzip.compress("\n\n".join(lines).encode()))
    opening_sentences(tmp_path, str(tmp_path), words=10, train=9, validation=1)
    train, held = (
        [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in texts.SPLITS
    )
    assert train == [
        {"source": "It ran from No. 1 to 3 . Then it", "target": "It ran from No. 1 to 3 ."},
        {"source": "It ran for a day . It rested .", "target": "It ran for a day ."},
    ]
    assert held == train[:1]


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


def test_pairs_have_both_labels_in_both_orders():
    rows = [("bad", "0"), ("good", "1"), ("poor", "0"), ("fine", "1"), ("great", "1")]
    assert opposites(rows) == [
        ("good", "bad", "0"),
        ("bad", "fine", "1"),
        ("fine", "poor", "0"),
        ("poor", "good", "1"),
    ]


def test_pairs_are_written_for_each_file(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for file in (TRAIN, TEST):
        (source / file).write_text("good\t1\nbad\t0\n")
    labelled_pairs(
        tmp_path, vocabulary=60, sets={"sst2": {"source": str(source), "words": 5, "texts": 9, "tests": 9}}
    )
    lines = (tmp_path / "sst2-pairs" / TEST).read_text().splitlines()
    assert lines == ["text\tpair\tlabel", "good\tbad\t0", "bad\tgood\t1"]


def test_documents_of_both_kinds_are_as_many_and_some_are_held_out(tmp_path: Path):
    coded_documents(tmp_path, None, 12_000)
    train, held_out = (by_code(tmp_path / f"{split}.jsonl") for split in SPLITS)
    for code in CODES:
        assert (len(train[code]), len(held_out[code])) == (38, 2)
        assert {len(text) for text in train[code]} == {LENGTH}
    judge = Judge(train)
    assert all(judge.share(held_out[code], code) == 1 for code in CODES)


def test_a_judge_weighs_the_share_of_each_n_gram_in_its_kind():
    judge = Judge({"a": ["abcabcabc"], "b": ["xyzxyz", "abcxyz"]})
    assert [judge.kind(text) for text in ("abc", "xyz", "abcxyzxyz")] == ["a", "b", "b"]
    assert judge.share(["abc", "xyz", "xyz", "xyz"], "b") == 0.75
