"""The files of a shard: written beside their names, synced and renamed; mapped into memory to be read."""

import hashlib
import os
from pathlib import Path

import numpy as np

from polyformer.core.errors import InputError
from polyformer.core.files import writing
from polyformer.data.prepared.manifest import Manifest, Shard

TOKENS, ENDS = "tokens", "ends"
END_DTYPE = np.dtype("<u8")
BLOCK = 2**22


class ShardWriter:
    """One shard while it is written. Documents go to the disk as they come; memory holds none of them."""

    def __init__(self, folder: Path, split: str, number: int, dtype: np.dtype):
        self.folder, self.split, self.number, self.dtype = folder, split, number, dtype
        self.tokens = self.documents = self.bytes = self.words = 0
        self.lossless = True
        name = f"{split}-{number:05}"
        self._paths = [folder / f"{name}.{suffix}" for suffix in (TOKENS, ENDS)]
        self._files = [open(_partial(path), "wb") for path in self._paths]  # noqa: SIM115
        self._digests = [hashlib.sha256(), hashlib.sha256()]

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of so many tokens each, end to end in `ids`."""
        ends = self.tokens + np.cumsum(lengths, dtype=END_DTYPE)
        for number, array in enumerate((ids.astype(self.dtype, copy=False), ends)):
            content = np.ascontiguousarray(array).data
            with writing(self._paths[number]):
                self._files[number].write(content)
            self._digests[number].update(content)
        self.tokens += len(ids)
        self.documents += len(lengths)

    def close(self) -> Shard:
        """Give the files their names; what they hold."""
        for path, file in zip(self._paths, self._files):
            with writing(path), file:
                file.flush()
                os.fsync(file.fileno())
            _partial(path).replace(path)
        names = ("split", "number", "tokens", "documents", "bytes", "words", "lossless")
        tokens, ends = (digest.hexdigest() for digest in self._digests)
        return Shard(**{name: getattr(self, name) for name in names}, sha256=(tokens, ends))

    def abandon(self) -> None:
        """Leave nothing."""
        for path, file in zip(self._paths, self._files):
            file.close()
            _partial(path).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def shard_files(folder: Path, shard: Shard) -> tuple[Path, Path]:
    """Its tokens and its ends."""
    return folder / f"{shard.name}.{TOKENS}", folder / f"{shard.name}.{ENDS}"


def mapped(folder: Path, manifest: Manifest, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """(token ids [tokens], ends [documents]), of which only the pages that are read come into memory.

    Raises `InputError` for a file that is missing or of another size.
    """
    counts = (manifest.dtype, shard.tokens), (END_DTYPE, shard.documents)
    tokens, ends = (_mapped(path, *count) for path, count in zip(shard_files(folder, shard), counts))
    return tokens, ends


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """`InputError` for a file of a shard that is missing or of another size than it had."""
    for shard in manifest.shards:
        sizes = shard.tokens * manifest.dtype.itemsize, shard.documents * END_DTYPE.itemsize
        for path, size in zip(shard_files(folder, shard), sizes):
            there = path.stat().st_size if path.is_file() else None
            if there != size:
                is_now = "is missing" if there is None else f"has {there:,} bytes where {size:,} were written"
                raise damaged(path, is_now)


def check_content(folder: Path, shard: Shard) -> None:
    """`InputError` where a file of a shard does not hold what was written: reads all of it."""
    for path, expected in zip(shard_files(folder, shard), shard.sha256):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        if digest.hexdigest() != expected:
            raise damaged(path, "does not hold what was written (another SHA-256)")


def damaged(path: Path, why: str) -> InputError:
    """An error for a file of a shard."""
    return InputError(
        f"{path}: damaged: it {why}; put back a copy, or remove the folder and prepare the text again"
    )


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype)  # nothing can be mapped of an empty file
    return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))
