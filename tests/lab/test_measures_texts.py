"""Texts that studies share: a book in documents, as the library reads a text file."""

import json
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.data import formats
from polyformer_lab.measures import texts

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
