"""The files of a store in its folder: its description, its entries, and their checksums.

    store.json           the description (`Manifest`), which is checked before the store is used
    keys.float16         [count, dimension], row after row
    values.int32         [count]
    checksums.uint32     [blocks, 2], CRC-32 of the keys and of the values of each block of about 1 MiB; a
                         block has `Manifest.block` entries, the last block may have fewer
    progress.json        during a build: the number of committed entries and of their windows

Keys and next tokens are appended. Entries are committed when all files are synced to the disk and
progress.json, which is replaced atomically, counts them. A resumed build truncates the files to the committed
entries.

Checksums are computed from the entries as they are written, not from the file. `polyformer datastore verify`
checks a whole store. Opening a store checks only `SAMPLE` blocks: a search touches keys everywhere, so
checking the keys that it reads would mean reading all of them. The sample detects large damage (lost pages,
the content of another file) in some hundredths of a second.
"""

import dataclasses
import math
import os
import random
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from polyformer.applications.retrieval.readers import Reading
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import open_file, read_json, reading, write_json, writing
from polyformer.core.paths import refuse_links
from polyformer.data.sources.checks import data_changes

MANIFEST = "store.json"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Config):
    """The description of a store."""

    version: int = VERSION
    dimension: int
    dtype: str = "float16"
    model: str  # fingerprint of its weights and configuration
    tokenizer: str  # fingerprint
    key: str  # kind of the keys: "feedforward", or "hidden" of a model of transformers
    reading: Reading
    text: tuple[dict[str, Any], ...]  # the files by size and digest (`polyformer.data.sources.checks`)
    part: int = 1  # the number of this part, from 1 to `parts`
    parts: int = 1
    count: int | None = None  # entries; None until the build is finished
    block: int | None = None  # entries per checksum (`checksums`); None in older stores

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return an example of a whole store."""
        return (cls(dimension=2, model="", tokenizer="", key="hidden", reading=Reading(), text=()),)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the manifest of the store in `folder`; raises `InputError` if it is missing or damaged."""
        if not (folder / MANIFEST).is_file():
            raise InputError(
                f"{folder}: not a datastore (it has no {MANIFEST}); build a store with "
                "polyformer datastore build"
            )
        refuse_links(folder)
        return cls.parsed(read_json(folder / MANIFEST, dict), folder / MANIFEST)

    @classmethod
    def parsed(cls, tree: dict[str, Any], place: object) -> Self:
        """Return the manifest from plain data that was read at `place`."""
        version = tree.get("version")
        if version != VERSION:
            raise InputError(f"{place}: expected a store of version {VERSION}, got {version}; build it again")
        try:
            manifest = cls.from_dict(tree)
        except InputError as error:
            raise InputError(f"{place}: damaged ({error}); build the store again") from error
        block = 1 if manifest.block is None else manifest.block
        numbers = manifest.dimension, (manifest.count or 0) + 1, block
        if manifest.dtype != "float16" or min(numbers) < 1:
            raise InputError(f"{place}: damaged; build the store again")
        return manifest

    def write(self, folder: Path) -> None:
        """Write the manifest to STORE/store.json."""
        write_json(folder / MANIFEST, self.to_dict())

    def check_same(self, other: Self, place: object) -> None:
        """Raise `InputError` if the build at `place`, with this manifest, cannot be resumed with `other`."""
        changes = data_changes({"text": list(self.text)}, {"text": list(other.text)})
        names = "model", "tokenizer", "key", "dimension", "reading", "part", "parts"
        differ = [name for name in names if getattr(self, name) != getattr(other, name)]
        if changes or differ or len(self.text) != len(other.text):
            what = "; ".join(changes) or f"another {', '.join(differ) or 'text'}"
            raise InputError(
                f"{place}: started with other input ({what}); use the same input, or choose another --out"
            )

    def check_reader(self, model: str, tokenizer: str, place: object) -> None:
        """Raise `InputError` unless the store was built with this model and tokenizer (fingerprints)."""
        for name, own, other in (("model", self.model, model), ("tokenizer", self.tokenizer, tokenizer)):
            if own != other:
                raise InputError(
                    f"{place}: built with another {name} ({own[:12]}, not {other[:12]}); take that one, or "
                    "build a store for this one by polyformer datastore build"
                )


CHECKSUMS = "checksums.uint32"
BLOCK_BYTES = 1 << 20
SAMPLE = 32


def block_entries(dimension: int) -> int:
    """Return the number of entries per block of a new store."""
    return max(1, BLOCK_BYTES // (2 * dimension))


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a whole file."""
    total = 0
    with reading(path), open_file(path) as file:
        while content := file.read(BLOCK_BYTES):
            total = zlib.crc32(content, total)
    return total


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write all of `content`; a single call of the system may write only a part."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


class ChecksumWriter:
    """A writer of checksums to a file; `there` are the existing entries.

    Checksums that the file does not contain yet (of an incomplete block, or of a store that was begun without
    checksums) are computed from the existing entries.
    """

    def __init__(self, file: BinaryIO, block: int, there: tuple[np.ndarray, np.ndarray]):
        self.file, self.block, self.filled, self.sums = file, block, 0, [0, 0]
        count = len(there[1])
        blocks = min(count // block, os.fstat(self.file.fileno()).st_size // 8)
        os.ftruncate(self.file.fileno(), 8 * blocks)
        for start in range(blocks * block, count, block):
            self.add(*(array[start : start + block] for array in there))

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Add the next entries."""
        start = 0
        while start < len(values):
            some = slice(start, start + self.block - self.filled)
            self.sums = [zlib.crc32(array[some].data, old) for array, old in zip((keys, values), self.sums)]
            taken = len(values[some])
            self.filled, start = self.filled + taken, start + taken
            if self.filled == self.block:
                self.end_block()

    def end_block(self) -> None:
        """Write the checksums of the current block, because it is full or no entry follows."""
        if self.filled:
            write_all(self.file, np.array(self.sums, "<u4").tobytes())
            self.filled, self.sums = 0, [0, 0]


class Checks:
    """A comparison of entries with the checksums in `folder`; older stores without checksums always pass.

    files: keys [M, D] and values [M] by the names of their files.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Mapping[str, np.ndarray]):
        self.folder, self.block, self.files = folder, manifest.block, files
        self.sums, self.passed = np.empty((0, 2), "<u4"), 0
        if self.block is not None:
            file, blocks = folder / CHECKSUMS, math.ceil((manifest.count or 0) / self.block)
            with reading(file), open_file(file) as binary:
                content = binary.read()
            if len(content) != 8 * blocks:
                raise InputError(
                    f"{file}: expected {8 * blocks:,} bytes, got {len(content):,}; it is damaged: restore it "
                    "from a copy, or build the store again"
                )
            self.sums = np.frombuffer(content, "<u4").reshape(blocks, 2)

    def check(self, blocks: Iterable[int]) -> None:
        """Raise `InputError` if one of these blocks differs from what was written."""
        for number in blocks:
            assert self.block is not None
            rows = slice(number * self.block, (number + 1) * self.block)
            for (name, array), expected in zip(self.files.items(), self.sums[number]):
                if zlib.crc32(array[rows].data) != expected:
                    last = min(rows.stop, len(array)) - 1
                    raise InputError(
                        f"{self.folder / name}: entries {rows.start:,} to {last:,} are not what was written; "
                        "it is damaged: restore it from a copy, or build the store again"
                    )

    def check_sample(self) -> None:
        """Raise `InputError` if one of some randomly chosen blocks differs from what was written."""
        count = len(self.sums)
        self.check(random.SystemRandom().sample(range(count), min(SAMPLE, count)))

    def check_until(self, stop: int) -> None:
        """Check the entries up to `stop`, without the blocks that earlier calls have checked."""
        if self.block is not None:
            blocks = min(math.ceil(stop / self.block), len(self.sums))
            self.check(range(self.passed, blocks))
            self.passed = max(self.passed, blocks)

    def check_all(self) -> None:
        """Check all blocks."""
        self.check(range(len(self.sums)))


KEYS, VALUES, PROGRESS = "keys.float16", "values.int32", "progress.json"


def check_sizes(folder: Path, manifest: Manifest, count: int, exactly: bool) -> None:
    """Raise `InputError` if a file has fewer bytes than `count` entries, or more if `exactly` is set."""
    for name, bytes_each in ((KEYS, 2 * manifest.dimension), (VALUES, 4)):
        file = folder / name
        with reading(file):
            size = file.stat().st_size
        if size < count * bytes_each or (exactly and size != count * bytes_each):
            raise InputError(
                f"{file}: expected {count * bytes_each:,} bytes for {count:,} entries, got {size:,}; it is "
                "damaged: restore it from a copy, or build the store again"
            )


def mapped_entries(folder: Path, manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys float16 [M, D] and values int32 [M] of a finished store, memory-mapped.

    Any number of processes share the memory.
    """
    count = manifest.count or 0
    check_sizes(folder, manifest, count, exactly=True)
    return first_entries(folder, manifest, count)


def first_entries(folder: Path, manifest: Manifest, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` keys and values, memory-mapped."""
    if not count:
        return np.empty((0, manifest.dimension), np.float16), np.empty(0, np.int32)
    with reading(folder):
        keys = np.memmap(folder / KEYS, np.float16, "r", shape=(count, manifest.dimension))
        values = np.memmap(folder / VALUES, np.int32, "r", shape=(count,))
    return keys, values


def checks(folder: Path, manifest: Manifest, entries: tuple[np.ndarray, np.ndarray]) -> Checks:
    """Return the comparison of a finished store's entries with their checksums."""
    return Checks(folder, manifest, dict(zip((KEYS, VALUES), entries)))


class EntryWriter:
    """A context manager that adds entries to the store in `folder`; the caller must hold its lock."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.windows = self.entries = 0
        if (folder / PROGRESS).exists():
            progress = read_json(folder / PROGRESS, dict)
            try:
                self.windows, self.entries = int(progress["windows"]), int(progress["entries"])
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{folder / PROGRESS}: damaged; remove {folder} and build again") from error
            check_sizes(folder, manifest, self.entries, exactly=False)
        self.files: list[BinaryIO] = []
        self.sums: ChecksumWriter

    def __enter__(self) -> Self:
        with writing(self.folder):
            for name, bytes_each in ((KEYS, 2 * self.manifest.dimension), (VALUES, 4)):
                file = open(self.folder / name, "ab", buffering=0)
                self.files.append(file)
                os.ftruncate(file.fileno(), self.entries * bytes_each)
            block = self.manifest.block or block_entries(self.manifest.dimension)
            there = first_entries(self.folder, self.manifest, self.entries)
            self.files.append(open(self.folder / CHECKSUMS, "ab", buffering=0))
            self.sums = ChecksumWriter(self.files[-1], block, there)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files:
            file.close()

    def add(self, keys: np.ndarray, values: np.ndarray, windows: int) -> None:
        """Add the entries of the next windows: float16 [n, D] and int32 [n]; `commit` saves them."""
        with writing(self.folder):
            for file, array in zip(self.files, (keys, values)):
                write_all(file, array.tobytes())
            self.sums.add(np.ascontiguousarray(keys), np.ascontiguousarray(values))
        self.entries += len(values)
        self.windows += windows

    def commit(self) -> None:
        """Commit all entries that were added."""
        with writing(self.folder):
            for file in self.files:
                os.fsync(file.fileno())
        write_json(self.folder / PROGRESS, {"windows": self.windows, "entries": self.entries})

    def finish(self) -> Manifest:
        """Commit the last entries, record their count in the manifest and return it."""
        with writing(self.folder):
            self.sums.end_block()
        self.commit()
        finished = dataclasses.replace(self.manifest, count=self.entries, block=self.sums.block)
        finished.write(self.folder)
        (self.folder / PROGRESS).unlink()
        return finished
