"""CRC-32 checksums of a store's entries: for each block of about 1 MiB a pair, of its keys and its values.

    checksums.uint32     [blocks, 2]; a block has `Manifest.block` entries, the last block may have fewer

They are computed from the entries as they are written, not from the file. `polyformer datastore verify`
checks a whole store. Opening a store checks only `SAMPLE` blocks: a search touches keys everywhere, so
checking the keys that it reads would mean reading all of them. The sample detects large damage (lost pages,
the content of another file) in some hundredths of a second.
"""

import math
import os
import random
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from polyformer.applications.retrieval.manifest import Manifest
from polyformer.core.errors import InputError
from polyformer.core.files import open_file, reading

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
