"""The entries of a store in its folder: keys and next tokens, in two append-only files.

    keys.float16     [count, dimension], row after row
    values.int32     [count]
    checksums.uint32 of both (`polyformer.applications.retrieval.checksums`)
    progress.json    during a build: the number of committed entries and of their windows

Entries are committed when all files are synced to the disk and progress.json, which is replaced atomically,
counts them. A resumed build truncates the files to the committed entries.
"""

import dataclasses
import os
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from polyformer.applications.retrieval.checksums import (
    CHECKSUMS,
    Checks,
    ChecksumWriter,
    block_entries,
    write_all,
)
from polyformer.applications.retrieval.manifest import Manifest
from polyformer.core.errors import InputError
from polyformer.core.files import read_json, reading, write_json, writing

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
