"""Tokens that followed the nearest contexts of every token of a text, for training on that text.

`polyformer datastore neighbours` writes them to a folder:

    neighbours.json     description (`NeighbourInfo`)
    neighbours.int32    [tokens, k], a row for each token, documents end to end; -1 for missing neighbours
    documents.int64     [documents, 2], the digest of each document's tokens and the row of its first token

A document is found by its tokens, regardless of order and part in which the text is read.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_json, reading
from polyformer.core.paths import refuse_links
from polyformer.data.tokenizers.tokenizer import Tokenizer

ABOUT, ROWS, DOCUMENTS = "neighbours.json", "neighbours.int32", "documents.int64"
VERSION = 1
MAKE = "make them by polyformer datastore neighbours"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighbourInfo(Config):
    """A description of neighbours.

    model: the fingerprint of the frozen model. entries: number of entries in the store. own: whether the
    store was built from this text, so that the own entry of a token is excluded. text: as in a store's
    manifest. tokens, documents: their numbers; None until the search is finished.
    """

    version: int = VERSION
    neighbours: int
    tokenizer: str
    model: str
    entries: int
    own: bool
    text: tuple[dict[str, Any], ...]
    tokens: int | None = None
    documents: int | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the description in `folder`; raises `InputError` if it is missing or damaged."""
        if not (folder / ABOUT).is_file():
            raise InputError(f"{folder}: holds no neighbours (no {ABOUT}); {MAKE}")
        refuse_links(folder)
        try:
            about = cls.from_dict(read_json(folder / ABOUT, dict))
        except InputError as error:
            raise InputError(f"{folder / ABOUT}: damaged ({error}); remove {folder} and {MAKE}") from error
        if about.version != VERSION:
            raise InputError(f"{folder}: expected version {VERSION}, got {about.version}; {MAKE} again")
        return about


class Neighbours:
    """The neighbours in some folders, for texts of `tokenizer`.

    Raises `InputError` for a folder that is unfinished, damaged, of another tokenizer, or with another number
    of neighbours than the first.
    """

    def __init__(self, folders: Sequence[str | Path], tokenizer: Tokenizer):
        self.folders = ", ".join(map(str, folders))
        self.tables: list[np.ndarray] = []
        self.places: dict[int, tuple[int, int]] = {}
        for number, name in enumerate(folders):
            folder = Path(name)
            about = NeighbourInfo.read(folder)
            if about.tokens is None or about.documents is None:
                raise InputError(
                    f"{folder}: not finished; resume by the same polyformer datastore neighbours"
                )
            if about.tokenizer != tokenizer.fingerprint:
                raise InputError(
                    f"{folder}: neighbours of another tokenizer ({about.tokenizer[:12]}, not "
                    f"{tokenizer.fingerprint[:12]}); take the one of the run that found them"
                )
            self.tables.append(mapped(folder / ROWS, np.int32, (about.tokens, about.neighbours)))
            self.neighbours = self.tables[0].shape[1]
            if about.neighbours != self.neighbours:
                raise InputError(
                    f"{folder}: {about.neighbours} neighbours a token, and others have {self.neighbours}; "
                    "find as many for every text"
                )
            for digest, row in mapped(folder / DOCUMENTS, np.int64, (about.documents, 2)).tolist():
                self.places[digest] = number, row

    def of(self, documents: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the neighbours [tokens, k] of documents, end to end; raises `InputError` if any has none."""
        rows = [np.empty((0, self.neighbours), np.int32)]
        for number, document in enumerate(documents):
            place = self.places.get(digest(document))
            if place is None:
                raise InputError(
                    f"task.neighbours: document {number + 1}, of {len(document)} tokens, has none in "
                    f"{self.folders}: they are of another text; {MAKE} for this one"
                )
            table, start = place
            rows.append(self.tables[table][start : start + len(document)])
        return np.concatenate(rows)


def digest(document: Sequence[int]) -> int:
    """Return a 64-bit digest of a document's tokens."""
    content = np.asarray(document, np.int32).tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def mapped(file: Path, dtype: type, shape: tuple[int, int]) -> np.ndarray:
    """Return an array in a file, memory-mapped; raises `InputError` if the file has another size."""
    expected = shape[0] * shape[1] * np.dtype(dtype).itemsize
    with reading(file):
        size = file.stat().st_size
        if size != expected:
            raise InputError(
                f"{file}: expected {expected:,} bytes for {shape[0]:,} rows, got {size:,}; it is damaged: "
                f"remove {quote(file.parent.name)} and {MAKE} again"
            )
        return np.memmap(file, dtype, "r", shape=shape) if expected else np.empty(shape, dtype)
