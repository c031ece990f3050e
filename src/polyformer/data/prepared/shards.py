"""The files of a shard: written under temporary names, synced and renamed; memory-mapped for reading."""

import hashlib
import os
from pathlib import Path

import numpy as np

from polyformer.core.errors import InputError
from polyformer.core.files import open_file, writing
from polyformer.data.prepared.manifest import Manifest, Shard

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
