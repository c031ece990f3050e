"""The description of a folder of prepared text, and of its input."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_json, write_json
from polyformer.core.paths import refuse_links
from polyformer.core.ranges import PositiveInt

MANIFEST, TOKENIZER, VERSION = "manifest.json", "tokenizer", 1
FORMAT = "polyformer prepared text"
SPLITS = ("train", "validation")
WIDEST_UINT16 = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Config):
    """A position between documents: after `row` rows of source number `source`. due: see `held_out.Due`."""

    source: int = 0
    row: int = 0
    due: float = 0.0
    documents: int = 0  # read so far, from all sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(Config):
    """An input file with its size and content; for a data set of the hub only its name."""

    name: str
    bytes: int = 0
    sha256: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(Config):
    """A pair of files.

    `words` and `lossless` (whether decoding restores the text, in NFC) are counted only for held-out text,
    for the metrics.
    """

    split: Literal["train", "validation"]
    number: int
    tokens: int
    documents: int
    bytes: int  # of UTF-8; of the text in NFC if it is held out
    words: int = 0
    lossless: bool = True
    sha256: tuple[str, str]  # of the tokens, of the ends

    @property
    def name(self) -> str:
        """Return the name of its files without the suffix."""
        return f"{self.split}-{self.number:05}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """Settings that, with the sources, determine the tokens of a folder."""

    tokenizer: str  # fingerprint
    trained: str = ""  # options of a tokenizer that was trained on the text
    format: str | None = None
    column: str = "text"
    validation: float = 0.005  # below 1 a share, evenly spaced; else the number of first documents
    shard_tokens: PositiveInt = 2**27

    def __post_init__(self) -> None:
        whole = self.validation >= 1 and self.validation == int(self.validation)
        if not (0 <= self.validation <= 0.5 or whole):
            raise InputError(
                "validation: expected a share of the text from 0 to 0.5, or a number of documents, "
                f"got {self.validation:g}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Config):
    """The content of manifest.json. place: the end of the written text in the sources; None when finished."""

    version: int = VERSION
    what: str = FORMAT
    settings: Settings
    vocab_size: int
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...] = ()
    place: Place | None = Place()

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of token ids in the files: little-endian uint16, or uint32 if necessary."""
        return np.dtype("<u2" if self.vocab_size <= WIDEST_UINT16 else "<u4")

    def of(self, split: str) -> list[Shard]:
        """Return the shards of a split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def write(self, folder: Path) -> None:
        """Replace the manifest in `folder`."""
        write_json(folder / MANIFEST, self.to_dict())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the manifest in `folder`; raises `InputError` if it is missing or cannot be read."""
        if not is_prepared(folder):
            raise InputError(
                f"{folder}: no prepared text (it has no {MANIFEST}); make it by polyformer data prepare"
            )
        refuse_links(folder)
        tree: dict[str, Any] = read_json(folder / MANIFEST, dict)
        if tree.get("what") != FORMAT or tree.get("version") != VERSION:
            raise InputError(
                f"{folder / MANIFEST}: expected {quote(FORMAT)} of version {VERSION}, got "
                f"{quote(tree.get('what'))} of version {quote(tree.get('version'))}; prepare it again"
            )
        try:
            return cls.from_dict(tree)
        except InputError as error:
            raise InputError(f"{folder / MANIFEST}: damaged ({error}); prepare it again") from error


def is_prepared(path: str | Path) -> bool:
    """Return whether `path` is a folder of prepared text, finished or not."""
    return (Path(path) / MANIFEST).is_file() and (Path(path) / TOKENIZER).is_dir()
