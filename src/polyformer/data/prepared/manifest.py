"""What a folder of prepared text holds, and of what it was made."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_json, write_json

MANIFEST, TOKENIZER, VERSION = "manifest.json", "tokenizer", 1
FORMAT = "polyformer prepared text"
SPLITS = ("train", "validation")
WIDEST_UINT16 = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Config):
    """Between two documents: `row` rows of source number `source` are read; `due`: see `held_out.Due`."""

    source: int = 0
    row: int = 0
    due: float = 0.0
    documents: int = 0  # read so far, of all sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(Config):
    """A file that was read, by its size and content; of a data set of the hub its name alone."""

    name: str
    bytes: int = 0
    sha256: str = ""

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """A file."""
        return (cls(name="a.txt"),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(Config):
    """One pair of files. `words` and `lossless` (whether decoding gives the text back, in NFC) are counted of
    held-out text alone, where metrics ask for them."""

    split: Literal["train", "validation"]
    number: int
    tokens: int
    documents: int
    bytes: int  # of UTF-8, of the text in NFC where it is held out
    words: int = 0
    lossless: bool = True
    sha256: tuple[str, str]  # of the tokens, of the ends

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """A shard of nothing."""
        return (cls(split="train", number=0, tokens=0, documents=0, bytes=0, sha256=("", "")),)

    @property
    def name(self) -> str:
        """The name of its files, but for the suffix."""
        return f"{self.split}-{self.number:05}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """What decides which tokens a folder holds, besides the sources."""

    tokenizer: str  # fingerprint
    trained: str = ""  # the options of a tokenizer that was trained on the text
    format: str | None = None
    column: str = "text"
    validation: float = 0.005  # below 1 a share of the text, evenly spread; else so many documents, the first
    shard_tokens: int = 2**27

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise InputError(f"shard_tokens: expected 1 or more, got {self.shard_tokens}")
        whole = self.validation >= 1 and self.validation == int(self.validation)
        if not (0 <= self.validation <= 0.5 or whole):
            raise InputError(
                "validation: expected a share of the text from 0 to 0.5, or a number of documents, "
                f"got {self.validation:g}"
            )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """With a tokenizer."""
        return (cls(tokenizer=""),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Config):
    """`place`: up to where the sources stand in shards; None once all of them do."""

    version: int = VERSION
    what: str = FORMAT
    settings: Settings
    vocab_size: int
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...] = ()
    place: Place | None = Place()

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """One that has begun."""
        return (cls(settings=Settings(tokenizer=""), vocab_size=3, sources=()),)

    @property
    def dtype(self) -> np.dtype:
        """Of a token id in the files: little-endian uint16, of larger vocabularies uint32."""
        return np.dtype("<u2" if self.vocab_size <= WIDEST_UINT16 else "<u4")

    def of(self, split: str) -> list[Shard]:
        """The shards of a split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def write(self, folder: Path) -> None:
        """Replace that of `folder`."""
        write_json(folder / MANIFEST, self.to_dict())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """That of `folder`; `InputError` where there is none, or one that cannot be read."""
        if not is_prepared(folder):
            raise InputError(
                f"{folder}: no prepared text (it has no {MANIFEST}); make it by polyformer data prepare"
            )
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
    """Whether `path` is a folder of prepared text, finished or not."""
    return (Path(path) / MANIFEST).is_file() and (Path(path) / TOKENIZER).is_dir()
