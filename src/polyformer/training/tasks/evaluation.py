"""Evaluations that processes share, with cached results.

The results of an evaluation can be cached in files, so that an interrupted evaluation can resume. The key of
a result is the digest of everything that it depends on: the model, its settings and the batch or text.
Another model, other data or another batch size therefore has other keys, and any number of processes can use
the results of any earlier number: each process appends to a separate file, and reads all files at the start.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from polyformer.core.files import open_file, reading, writing
from polyformer.training import share
from polyformer.training.machine import ReplicaGroup
from polyformer.training.task import EvaluationGroup

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


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes of an evaluation, by default a single process.

    `add` sums a tensor over them, `gather` concatenates their lists, in every process. Cached `results` are
    not computed again.
    """

    rank: int = 0
    world: int = 1
    add: Callable[[Tensor], Tensor] = lambda total: total
    gather: Callable[[list[Any]], list[Any]] = lambda values: values
    results: CachedResults | None = None

    @classmethod
    def of(cls, accelerator: EvaluationGroup) -> Self:
        """Return the processes of `accelerator`."""
        if accelerator.num_processes == 1:
            return cls()
        from accelerate.utils import gather_object

        add = partial(accelerator.reduce, reduction="sum")
        # Of the processes that share a replica each has the same values, which count once.
        gather = accelerator.gather_lists if isinstance(accelerator, ReplicaGroup) else gather_object
        return cls(accelerator.process_index, accelerator.num_processes, add, gather)  # type: ignore[arg-type]

    def total(self, function: Callable[[Any], Tensor], batches: Iterable[Any], zero: Tensor) -> list[float]:
        """Return `zero` plus the sum of `function(batch)` over all batches, computed in shares."""
        known = function if self.results is None else partial(self.results.tensor, function)
        for batch in share(batches, 0, self.rank, self.world):
            zero = zero + known(batch).to(zero.device)
        return self.add(zero).tolist()

    def each(self, function: Callable[[list[Any]], Sequence[Any]], items: Sequence[Any]) -> list[Any]:
        """Return `function(items)`, a result per item in order, in every process, computed in shares."""
        own = range(self.rank, len(items), self.world)
        known = function if self.results is None else partial(self.results.each, function)
        values = known([items[number] for number in own]) if own else []
        return [value for _, value in sorted(self.gather([*zip(own, values)]), key=lambda pair: pair[0])]


SINGLE_PROCESS = Workers()
"""A single process."""
