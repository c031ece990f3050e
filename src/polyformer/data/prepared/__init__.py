"""Text tokenized once into files that training memory-maps, for text larger than memory.

    preparing      documents -> blocks -> token ids by several threads -> shards, a manifest after each
    this module    the manifest and the shards of a folder; its splits and documents, also end to end
    rows           the rows of a run: packed, in a shuffled order without memory, or documents in order

A folder DIR:

    manifest.json           sources, tokenizer, shards with their sizes and checksums
    tokenizer/              the tokenizer's files
    train-00000.tokens      token ids of the documents end to end, without special tokens: uint16, or uint32
    train-00000.ends        the end of each document among them: uint64
    validation-00000.*      the same for the held-out documents

The manifest describes the folder and its input. The files of a shard are written under temporary names,
synced and renamed. Each split of a finished folder is a memory-mapped sequence of documents.
"""

import bisect
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import open_file, read_json, write_json, writing
from polyformer.core.paths import refuse_links
from polyformer.core.ranges import PositiveInt
from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer

MANIFEST, TOKENIZER, VERSION = "manifest.json", "tokenizer", 1
FORMAT = "polyformer prepared text"
SPLITS = ("train", "validation")
WIDEST_UINT16 = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Config):
    """A position between documents: after `row` rows of source number `source`.

    due: how much more text should be held out by now, see `sources.held_out.EvenSelection`.
    """

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


TOKENS, ENDS = "tokens", "ends"
END_DTYPE = np.dtype("<u8")
BLOCK = 2**22


class ShardWriter:
    """A writer of a shard. Documents are written to the disk immediately and not kept in memory."""

    def __init__(self, folder: Path, split: str, number: int, dtype: np.dtype):
        self.folder, self.split, self.number, self.dtype = folder, split, number, dtype
        self.tokens = self.documents = self.bytes = self.words = 0
        self.lossless = True
        name = f"{split}-{number:05}"
        self._paths = [folder / f"{name}.{suffix}" for suffix in (TOKENS, ENDS)]
        self._files = [open(_partial(path), "wb") for path in self._paths]  # noqa: SIM115
        self._digests = [hashlib.sha256(), hashlib.sha256()]

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of these lengths, end to end in `ids`."""
        ends = self.tokens + np.cumsum(lengths, dtype=END_DTYPE)
        for number, array in enumerate((ids.astype(self.dtype, copy=False), ends)):
            content = np.ascontiguousarray(array).data
            with writing(self._paths[number]):
                self._files[number].write(content)
            self._digests[number].update(content)
        self.tokens += len(ids)
        self.documents += len(lengths)

    def close(self) -> Shard:
        """Rename the files to their final names; return their description."""
        for path, file in zip(self._paths, self._files):
            with writing(path), file:
                file.flush()
                os.fsync(file.fileno())
            _partial(path).replace(path)
        names = ("split", "number", "tokens", "documents", "bytes", "words", "lossless")
        tokens, ends = (digest.hexdigest() for digest in self._digests)
        return Shard(**{name: getattr(self, name) for name in names}, sha256=(tokens, ends))

    def abandon(self) -> None:
        """Remove the partial files."""
        for path, file in zip(self._paths, self._files):
            file.close()
            _partial(path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def shard_files(folder: Path, shard: Shard) -> tuple[Path, Path]:
    """Return the paths of its tokens and its ends."""
    return folder / f"{shard.name}.{TOKENS}", folder / f"{shard.name}.{ENDS}"


def mapped(folder: Path, manifest: Manifest, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids [tokens], ends [documents]) of a shard. Tokens are loaded when they are read.

    Raises `InputError` for a file that is missing or has another size, and for ends that do not rise from 0
    to the number of tokens. All ends are read once, 8 bytes per document.
    """
    counts = (manifest.dtype, shard.tokens), (END_DTYPE, shard.documents)
    paths = shard_files(folder, shard)
    tokens, ends = (_mapped(path, *count) for path, count in zip(paths, counts))
    _check_ends(paths[1], ends, shard.tokens)
    return tokens, ends


def _check_ends(path: Path, ends: np.ndarray, tokens: int) -> None:
    last = int(ends[-1]) if len(ends) else 0
    if last != tokens:
        raise damaged(path, f"ends the last document at token {last} of {tokens}")
    for start in range(0, len(ends), BLOCK):
        some = ends[start : start + BLOCK + 1]
        if (some[1:] < some[:-1]).any():
            raise damaged(path, "ends a document before it begins")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise `InputError` if a file of a shard is missing or has another size than recorded."""
    for shard in manifest.shards:
        sizes = shard.tokens * manifest.dtype.itemsize, shard.documents * END_DTYPE.itemsize
        for path, size in zip(shard_files(folder, shard), sizes):
            there = path.stat().st_size if path.is_file() else None
            if there != size:
                is_now = "is missing" if there is None else f"has {there:,} bytes where {size:,} were written"
                raise damaged(path, is_now)


def check_content(folder: Path, shard: Shard) -> None:
    """Raise `InputError` if a file of a shard differs from what was written; reads the whole file."""
    for path, expected in zip(shard_files(folder, shard), shard.sha256):
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected:
            raise damaged(path, "does not hold what was written (another SHA-256)")


def damaged(path: Path, why: str) -> InputError:
    """Return an error for a file of a shard."""
    return InputError(
        f"{path}: damaged: it {why}; put back a copy, or remove the folder and prepare the text again"
    )


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))


class PreparedFolder:
    """A folder finished by `polyformer data prepare`.

    Raises `InputError` for any other folder, and for files that are missing or have another size.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        if self.manifest.place is not None:
            raise InputError(
                f"{folder}: not finished; resume by the same polyformer data prepare ... --out {folder}"
            )
        check_sizes(self.folder, self.manifest)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the tokens."""
        tokenizer = load_tokenizer(self.folder / TOKENIZER)
        if tokenizer.fingerprint != self.manifest.settings.tokenizer:
            raise InputError(
                f"{self.folder / TOKENIZER}: not the tokenizer that made the tokens; put back that one"
            )
        return tokenizer

    def split(self, name: str) -> "PreparedSplit | None":
        """Return the documents of "train" or "validation"; None if there are none."""
        split = PreparedSplit(self, name)
        return split if len(split) else None

    def verify(self) -> None:
        """Compare all files with their checksums; raises `InputError` for the first file that differs."""
        assert self.tokenizer
        for shard in self.manifest.shards:
            check_content(self.folder, shard)


class PreparedSplit:
    """The documents of a split, in the order of the sources, as token ids without special tokens."""

    def __init__(self, source: PreparedFolder, name: str):
        self.source, self.name = source, name
        self.shards = source.manifest.of(name)
        self.token_starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        """The number of each shard's first token, and of all tokens."""
        self.starts = np.cumsum([0, *(shard.documents for shard in self.shards)])
        """The number of each shard's first document, and of all documents."""
        self._mapped = cache(self._map)  # maps each shard only when it is read

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, number: int) -> np.ndarray:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = int(np.searchsorted(self.starts, number, "right")) - 1
        tokens, ends = self.arrays(shard)
        place = number - int(self.starts[shard])
        return self.checked(tokens[int(ends[place - 1]) if place else 0 : int(ends[place])], shard)

    def __iter__(self) -> Iterator[np.ndarray]:
        for shard in range(len(self.shards)):
            tokens, ends = self.arrays(shard)
            start = 0
            for end in ends:
                yield self.checked(tokens[start : int(end)], shard)
                start = int(end)

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return int(self.token_starts[-1])

    @property
    def counts(self) -> dict[str, float]:
        """Return words and bytes of the text for a language model's metrics; {} if tokenization was lossy."""
        if not self.shards or self.name == "train" or not all(shard.lossless for shard in self.shards):
            return {}
        return {name: sum(getattr(shard, name) for shard in self.shards) for name in ("words", "bytes")}

    def arrays(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, ends) of a shard, memory-mapped."""
        return self._mapped(shard)

    def checked(self, ids: np.ndarray, shard: int) -> np.ndarray:
        """Return `ids` that were read from a shard; raises `InputError` for an id outside the vocabulary."""
        manifest = self.source.manifest
        if len(ids) and int(ids.max()) >= manifest.vocab_size:
            path = shard_files(self.source.folder, self.shards[shard])[0]
            raise damaged(path, f"has the token {int(ids.max())}, and the vocabulary {manifest.vocab_size}")
        return ids

    def _map(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        return mapped(self.source.folder, self.source.manifest, self.shards[shard])


@dataclass(frozen=True, eq=False)
class FramedText:
    """All documents of a split end to end, read from any position.

    The tokens `before` (b) and `behind` (e) each document are not in the files:

        b d0 d0 d0 e b d1 e b d2 d2 e
        0            5      8
    """

    split: PreparedSplit
    before: int
    behind: int

    def __len__(self) -> int:
        return self.split.tokens + 2 * len(self.split)

    @cached_property
    def shard_starts(self) -> np.ndarray:
        """Return the start of each shard, and the end of the last: [shards + 1]."""
        return self.split.token_starts + 2 * self.split.starts

    def starts(self, step: int = 1) -> np.ndarray:
        """Return the starts of documents 0, step, 2 step, ..., and the end of the last document."""
        starts = []
        for shard, first in enumerate(self.split.starts[:-1].tolist()):
            ends = self.split.arrays(shard)[1]
            numbers = np.arange(-first % step, len(ends), step)
            before = np.where(numbers > 0, ends[numbers - 1], 0).astype(np.int64)
            starts.append(self.shard_starts[shard] + before + 2 * numbers)
        return np.concatenate([*starts, [len(self)]])

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (document number, int64 token ids) of each document, or part of it, between two positions."""
        if start >= stop:
            return
        shard = int(np.searchsorted(self.shard_starts, start, "right")) - 1
        ends = self.split.arrays(shard)[1]
        within = start - int(self.shard_starts[shard])
        number = bisect.bisect_right(range(len(ends)), within, key=lambda i: int(ends[i]) + 2 * (i + 1))
        while start < stop:
            tokens, ends = self.split.arrays(shard)
            first, last = int(ends[number - 1]) if number else 0, int(ends[number])
            begin = int(self.shard_starts[shard]) + first + 2 * number
            after = min(stop, begin + last - first + 2)
            ids = tokens[max(first, first + start - begin - 1) : min(last, first + after - begin - 1)]
            parts = [self.split.checked(ids, shard).astype(np.int64)]
            if start == begin:
                parts.insert(0, np.array([self.before]))
            if after == begin + last - first + 2:
                parts.append(np.array([self.behind]))
            yield int(self.split.starts[shard]) + number, np.concatenate(parts)
            start, number = after, number + 1
            if number == len(ends):
                shard, number = shard + 1, 0
