"""What an evaluation has computed, kept in files, so that one that was stopped goes on.

A result is kept under the digest of all that it depends on: the model, its settings and the batch or text
itself. So another model, other data or another batch size finds nothing, and any number of processes goes on
with what any other left: each appends to a file of its own, and reads the files of all when it starts.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.core.files import reading, writing

PORTION = 64
"""Texts whose results are computed together, and lost together."""


class Results:
    """Those in `folder` of the model that `subject` tells from all others. reused, computed: how many of the
    results that this process was asked for lay there, and how many did not.

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
            self.values |= whole_lines(file)
        self.append("\n")  # ends a line that a kill has cut short

    def tensor(self, function: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """`function(batch)`, float64 numbers."""
        key = self.key("batch", batch)
        if key not in self.values:
            self.keep(key, function(batch).tolist())
        else:
            self.reused += 1
        return torch.tensor(self.values[key], dtype=torch.float64)

    def each(self, function: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]) -> list[Any]:
        """`function(items)`, a result for each, which JSON can hold."""
        keys = [self.key("text", item) for item in items]
        missing = [number for number, key in enumerate(keys) if key not in self.values]
        self.reused += len(items) - len(missing)
        for start in range(0, len(missing), PORTION):
            portion = missing[start : start + PORTION]
            for number, value in zip(portion, function([items[number] for number in portion]), strict=True):
                self.keep(keys[number], value)
        return [self.values[key] for key in keys]

    def key(self, kind: str, value: Any) -> str:
        """What a result is kept under."""
        digest = hashlib.blake2b(f"{self.subject} {kind}".encode(), digest_size=20)
        take_in(digest, value)
        return digest.hexdigest()

    def keep(self, key: str, value: Any) -> None:
        """A line that outlives this process from here on."""
        self.values[key] = value
        self.computed += 1
        content = json.dumps([key, value])
        self.append(f"{checksum(content)} {content}\n")

    def append(self, text: str) -> None:
        """Write at the end of this process's file."""
        with writing(self.file), self.file.open("ab") as file:
            file.write(text.encode())


def whole_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The keys and values of a file; lines that a kill has cut short, or that were damaged, are left out."""
    with reading(path), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            check, _, content = line.rstrip("\n").partition(" ")
            if check and check == checksum(content):
                key, value = json.loads(content)
                yield key, value


def checksum(content: str) -> str:
    """Tells a whole line from a damaged one."""
    return hashlib.blake2b(content.encode(), digest_size=4).hexdigest()


def take_in(digest: hashlib.blake2b, value: Any) -> None:
    """Take a value's content into `digest`: tensors, arrays, dataclasses, mappings, lists and plain data."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif dataclasses.is_dataclass(value):
        take_in(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, dict):
        for name in sorted(value):
            take_in(digest, name)
            take_in(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} values".encode())
        for item in value:
            take_in(digest, item)
    else:
        digest.update(f"{type(value).__name__} {json.dumps(value)}".encode())
