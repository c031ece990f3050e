"""Cached results of an evaluation in files, so that an interrupted evaluation can resume.

The key of a result is the digest of everything that it depends on: the model, its settings and the batch or
text. Another model, other data or another batch size therefore has other keys, and any number of processes
can use the results of any earlier number: each process appends to a separate file, and reads all files at the
start.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.files import open_file, reading, writing

CHUNK = 64
"""Number of texts that are computed together; an interruption loses at most these results."""


class CachedResults:
    """The cached results in `folder` for the model identified by `subject`.

    reused, computed: the numbers of results that this process found in the cache, and that it computed.

    Raises:
        InputError: a folder that cannot be read or written, a full disk.
    """

    def __init__(self, folder: Path, subject: str, rank: int = 0) -> None:
        self.subject, self.reused, self.computed = subject, 0, 0
        self.file = folder / f"process-{rank}.jsonl"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.values: dict[str, Any] = {}
        for file in sorted(folder.glob("process-*.jsonl")):
            self.values |= intact_lines(file)
        self.append("\n")  # terminates a line truncated by a kill

    def tensor(self, function: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return `function(batch)`, float64 numbers."""
        key = self.key("batch", batch)
        if key not in self.values:
            self.store(key, function(batch).tolist())
        else:
            self.reused += 1
        return torch.tensor(self.values[key], dtype=torch.float64)

    def each(self, function: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]) -> list[Any]:
        """Return `function(items)`, a result for each item that is serializable as JSON."""
        keys = [self.key("text", item) for item in items]
        missing = [number for number, key in enumerate(keys) if key not in self.values]
        self.reused += len(items) - len(missing)
        for start in range(0, len(missing), CHUNK):
            portion = missing[start : start + CHUNK]
            for number, value in zip(portion, function([items[number] for number in portion]), strict=True):
                self.store(keys[number], value)
        return [self.values[key] for key in keys]

    def key(self, kind: str, value: Any) -> str:
        """Return the key of a result."""
        digest = hashlib.blake2b(f"{self.subject} {kind}".encode(), digest_size=20)
        update_digest(digest, value)
        return digest.hexdigest()

    def store(self, key: str, value: Any) -> None:
        """Save a result in the file."""
        self.values[key] = value
        self.computed += 1
        content = json.dumps([key, value])
        self.append(f"{checksum(content)} {content}\n")

    def append(self, text: str) -> None:
        """Append to the file of this process."""
        with writing(self.file), self.file.open("ab") as file:
            file.write(text.encode())


def intact_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values in a file, without truncated or damaged lines."""
    with reading(path), io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            check, _, content = line.rstrip("\n").partition(" ")
            if check and check == checksum(content):
                key, value = json.loads(content)
                yield key, value


def checksum(content: str) -> str:
    """Return the checksum of a line."""
    return hashlib.blake2b(content.encode(), digest_size=4).hexdigest()


def update_digest(digest: hashlib.blake2b, value: Any) -> None:
    """Update `digest` with a value: tensors, arrays, dataclasses, mappings, lists and plain data."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif dataclasses.is_dataclass(value):
        update_digest(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, dict):
        for name in sorted(value):
            update_digest(digest, name)
            update_digest(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} values".encode())
        for item in value:
            update_digest(digest, item)
    else:
        digest.update(f"{type(value).__name__} {json.dumps(value)}".encode())
