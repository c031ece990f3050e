"""Preparations that write texts: a document on each line of train.jsonl and validation.jsonl."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.data import DataConfig, load, read
from polyformer.data.formats.readers import PIECE
from polyformer.data.sources.files import opened
from polyformer.training.recipes.recipe import with_data
from polyformer_lab.cells import preparation
from polyformer_lab.sources import SOURCES

CHARACTERS = 8
"""The most characters of a token, on average."""

HELD_OUT = 20
"""The share of a book that is held out, from its end."""

BOOK = re.compile(r"^\*\*\* ?START OF [^\n]*\n(.*?)^\*\*\* ?END OF ", re.DOTALL | re.MULTILINE)
"""The lines that separate the book from Project Gutenberg's own text before and after it."""

SPLITS = "train", "validation"


@preparation
def documents(folder: Path, text: str | None) -> None:
    """Write all documents of a text.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2, the file of a book, or None for the default text.
    """
    for split, rows in split_texts(text).items():
        write_rows(folder, split, rows)


@preparation
def beginnings(folder: Path, text: str | None, train: int, validation: int) -> None:
    """Write the beginning of each split as one document, long enough for the required number of tokens."""
    for split, tokens in (("train", train), ("validation", validation)):
        whole = "".join(split_texts(text)[split])
        write_rows(folder, split, [whole[: CHARACTERS * tokens]])


@preparation
def articles(folder: Path, text: str, characters: int, held_out: int) -> None:
    """Write the first articles of each split of WikiText-2, also of the test text.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2.
        characters: the number of characters of the training text, to the end of an article.
        held_out: the number of characters of each other text.
    """
    for split, name in {"train": "train", "validation": "valid", "test": "test"}.items():
        files = {"path": f"{name}.txt.gz", "format": "articles", "streaming": True}
        data = DataConfig.from_dict(with_data(files, text))
        left, rows = characters if split == "train" else held_out, list[str]()
        for article in texts_of(data):
            if left <= 0:
                break
            rows.append(article)
            left -= len(article)
        write_rows(folder, split, rows)


def split_texts(text: str | None) -> dict[str, Iterator[str]]:
    """Return the documents of a text, given as for `documents`, by their split."""
    if text is not None and Path(text).is_file():
        return {split: pieces(part) for split, part in zip(SPLITS, book(text))}
    described = with_data(dict(SOURCES["wikitext2"].data or {}), text) if text else {}
    splits = load(DataConfig.from_dict(described), ("text",))
    return {split: (str(dict(row)["text"]) for row in getattr(splits, split)) for split in SPLITS}


def book(file: str) -> tuple[str, str]:
    """Return a book without its last twentieth, and that last part.

    Raises:
        InputError: the book is too short.
    """
    with opened(Path(file)) as text:
        whole = text.read().replace("\r\n", "\n")
    marked = BOOK.search(whole)
    whole = marked[1] if marked else whole
    cut = whole.find("\n", len(whole) - len(whole) // HELD_OUT) + 1
    if not whole[:cut].strip() or not whole[cut:].strip():
        raise InputError(f"{file}: too short a book to hold out the last twentieth; take a longer book")
    return whole[:cut], whole[cut:]


def pieces(text: str) -> Iterator[str]:
    """Yield documents in the units of a text file: `PIECE` characters and the rest of the line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def texts_of(data: DataConfig) -> Iterator[str]:
    """Yield the texts of a source lazily."""
    return (str(dict(row)["text"]) for row in read(data, ("text",), data.path))


def write_rows(folder: Path, split: str, rows: Iterable[str]) -> None:
    """Write the documents of a split."""
    write_lines(folder, split, ({"text": row} for row in rows))


def write_lines(folder: Path, split: str, rows: Iterable[Mapping[str, str]]) -> None:
    """Write the rows of a split as lines of JSON."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    atomic_write(folder / f"{split}.jsonl", lines.encode())


def first_ids(file: str, tokenizer: Any, count: int) -> list[int]:
    """Return the first `count` token ids of the first document in a file written by a preparation.

    Raises:
        InputError: the text is shorter.
    """
    with open(file, encoding="utf-8") as lines:
        text = json.loads(lines.readline())["text"]
    ids = tokenizer.encode(text)[:count]
    if len(ids) < count:
        raise InputError(f"data: expected {count} tokens or more, got {len(ids)}; take a longer text")
    return ids
