"""Read a text with a model and keep an entry for each token: stopped at any moment, it goes on where it was.

Windows are read in batches that are the same every time, so that a build that was interrupted has the keys of
one that was not. Of several parts each reads the windows whose number is its own modulo `parts`.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from polyformer.core.errors import InputError
from polyformer.core.files import remove_partials
from polyformer.datastore.checksums import block_entries
from polyformer.datastore.entries import PROGRESS, EntryWriter
from polyformer.datastore.manifest import MANIFEST, Manifest
from polyformer.datastore.readers import ContextReader
from polyformer.datastore.windows import Window, windows
from polyformer.training.lock import LOCK, MARKER, sole_writer

BATCH_TOKENS = 4096
"""Tokens that the model reads at once."""

COMMIT_SECONDS = 5.0
"""So much time may be lost."""


@dataclasses.dataclass
class Progress:
    """What a build has done: entries in all, and of this process entries, seconds, and those in the model."""

    total: int = 0
    entries: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0


Report = Callable[[Progress], None]


class Writer(Protocol):
    """Where entries go. windows: those that count already."""

    windows: int
    entries: int

    def add(self, keys: np.ndarray, values: np.ndarray, windows: int) -> None:
        """As `EntryWriter.add`."""
        ...

    def commit(self) -> None:
        """As `EntryWriter.commit`."""
        ...


def build(
    reader: ContextReader,
    texts: Iterable[str],
    manifest: Manifest,
    folder: Path,
    report: Report = lambda progress: None,
) -> Manifest:
    """Build the store, or part, that `manifest` describes, or go on with it; a finished one stays as it is.

    Raises `InputError` where the folder holds another store, another process builds there, or the disk is
    full; what was saved before stays.
    """
    with sole_writer(folder, "it goes on later by the same command"):
        begun = begin(folder, manifest)
        if begun.count is not None:
            return begun
        with EntryWriter(folder, begun) as writer:
            write(reader, texts, manifest, writer, report)
            if not writer.entries:
                raise InputError(f"{folder}: the text has no token with another behind it, so no entry")
            return writer.finish()


def begin(folder: Path, manifest: Manifest, known: tuple[str, ...] = ()) -> Manifest:
    """The manifest in `folder`, where `manifest` is written first unless there is one already.

    `known`: what may lie there beside the store's own files.
    """
    remove_partials(folder)
    if not (folder / MANIFEST).exists():
        others = {path.name for path in folder.iterdir()} - {LOCK, MARKER, *known}
        if others:
            raise InputError(f"{folder}: holds something else ({min(others)}); choose another --out")
        begun = dataclasses.replace(manifest, block=block_entries(manifest.dimension))
        begun.write(folder)
        return begun
    begun = Manifest.read(folder)
    begun.check_same(manifest, folder)
    if begun.count is not None:
        (folder / PROGRESS).unlink(missing_ok=True)  # of a build that died with its last breath
    return begun


def write(
    reader: ContextReader,
    texts: Iterable[str],
    manifest: Manifest,
    writer: Writer,
    report: Report,
) -> None:
    """Read what is still to be read, and add its entries."""
    own = (
        window
        for window in windows(reader.documents(texts), manifest.reading)
        if window.number % manifest.parts == manifest.part - 1
    )
    size = max(1, BATCH_TOKENS // manifest.reading.length)
    progress, start = Progress(writer.entries), time.monotonic()
    committed = start
    for batch in batches(own, size, writer.windows):
        before = time.monotonic()
        keys = keys_of(reader, batch)
        progress.model_seconds += time.monotonic() - before
        values = np.concatenate([window.ids[window.carried + 1 :] for window in batch])
        writer.add(keys, values, len(batch))
        progress.entries += len(values)
        now = time.monotonic()
        progress.total, progress.seconds = writer.entries, now - start
        if now - committed > COMMIT_SECONDS:
            writer.commit()
            report(progress)
            committed = now
    report(progress)


def batches(own: Iterator[Window], size: int, done: int) -> Iterator[list[Window]]:
    """The windows behind the first `done`, in the same batches of `size` however many are done."""
    while batch := list(itertools.islice(own, size)):
        if done:
            assert done >= len(batch), "whole batches count"
            done -= len(batch)
            continue
        yield batch


def keys_of(reader: ContextReader, batch: list[Window]) -> np.ndarray:
    """The keys [n, D] of all entries of a batch, in float16."""
    keys = []
    for group in equally_long(batch):
        read, _ = reader.read(*tensors(reader, group))
        keys += [rows[window.carried :] for window, rows in zip(group, read)]
    halves = torch.cat(keys).half().cpu()
    if not bool(halves.isfinite().all()):
        raise InputError(f"{reader.folder}: keys are not finite in float16, in which a store has them")
    return halves.numpy()


def equally_long(batch: list[Window]) -> Iterator[list[Window]]:
    """Runs of windows that are read with as many tokens: the first and the last may be shorter."""
    for _, group in itertools.groupby(batch, key=lambda window: len(window.ids)):
        yield list(group)


def tensors(reader: ContextReader, group: list[Window]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids [B, T] and documents [B, T] that `ContextReader.read` takes, on the model's device."""
    device = next(reader.model.parameters()).device
    ids = torch.from_numpy(np.stack([window.ids[:-1] for window in group])).long().to(device)
    if not reader.isolated:
        return ids, None
    documents = np.stack([window.documents[:-1] for window in group]).astype(np.int64)
    return ids, torch.from_numpy(documents - documents[:, :1]).to(device)
