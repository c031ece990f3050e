"""The entries of a store in its folder: keys and next tokens, in two files that only grow.

    keys.float16     [count, dimension], row after row
    values.int32     [count]
    checksums.uint32 of both (`polyformer.datastore.checksums`)
    progress.json    while it is built: how many of these count, and how many windows they are of

What a process that died has written behind them is cut off when the next one goes on: entries count from the
moment that all files are on the disk and progress.json, replaced as a whole, says so.
"""

import dataclasses
import os
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from polyformer.core.errors import InputError
from polyformer.core.files import read_json, reading, write_json, writing
from polyformer.datastore.checksums import CHECKSUMS, Checks, ChecksumWriter, block_entries, write_all
from polyformer.datastore.manifest import Manifest

KEYS, VALUES, PROGRESS = "keys.float16", "values.int32", "progress.json"


def check_sizes(folder: Path, manifest: Manifest, count: int, exactly: bool) -> None:
    """Raises `InputError` where a file has fewer bytes than `count` entries, or with `exactly` more."""
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
    """Keys float16 [M, D] and values int32 [M] of a finished store, mapped and not read: any number of
    processes share the memory."""
    count = manifest.count or 0
    check_sizes(folder, manifest, count, exactly=True)
    return first_entries(folder, manifest, count)


def first_entries(folder: Path, manifest: Manifest, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` keys and values, mapped."""
    if not count:
        return np.empty((0, manifest.dimension), np.float16), np.empty(0, np.int32)
    with reading(folder):
        keys = np.memmap(folder / KEYS, np.float16, "r", shape=(count, manifest.dimension))
        values = np.memmap(folder / VALUES, np.int32, "r", shape=(count,))
    return keys, values


def checks(folder: Path, manifest: Manifest, entries: tuple[np.ndarray, np.ndarray]) -> Checks:
    """What compares the entries of a finished store with their checksums."""
    return Checks(folder, manifest, dict(zip((KEYS, VALUES), entries)))


class EntryWriter:
    """Adds entries to the store in `folder`, whose lock the caller holds. Used as a context."""

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
        """The entries of the next windows: float16 [n, D] and int32 [n]. They count after `commit`."""
        with writing(self.folder):
            for file, array in zip(self.files, (keys, values)):
                write_all(file, array.tobytes())
            self.sums.add(np.ascontiguousarray(keys), np.ascontiguousarray(values))
        self.entries += len(values)
        self.windows += windows

    def commit(self) -> None:
        """From now on they count."""
        with writing(self.folder):
            for file in self.files:
                os.fsync(file.fileno())
        write_json(self.folder / PROGRESS, {"windows": self.windows, "entries": self.entries})

    def finish(self) -> Manifest:
        """The store is whole, and says so in its manifest."""
        with writing(self.folder):
            self.sums.end_block()
        self.commit()
        finished = dataclasses.replace(self.manifest, count=self.entries, block=self.sums.block)
        finished.write(self.folder)
        (self.folder / PROGRESS).unlink()
        return finished
