"""Texts that studies share: a book in documents, as the library reads a text file; pairs of paragraphs."""

import gzip
import json
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.data.formats import readers as formats
from polyformer_lab.measures import texts
from polyformer_lab.measures.texts import opening_sentences

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
