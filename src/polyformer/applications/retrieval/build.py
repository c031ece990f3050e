"""A build reads a text with a model and saves one entry per token; it resumes after any interruption.

Windows are batched identically in every run, so that an interrupted build produces the same keys as an
uninterrupted build. Each of several parts reads the windows with `number % parts == part - 1`.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from polyformer.applications.retrieval.checksums import block_entries
from polyformer.applications.retrieval.entries import PROGRESS, EntryWriter
from polyformer.applications.retrieval.manifest import MANIFEST, Manifest
from polyformer.applications.retrieval.readers import ContextReader
from polyformer.applications.retrieval.windows import Reading, Window, windows
from polyformer.core.errors import InputError
from polyformer.core.files import remove_partials
from polyformer.training.run_control import LOCK, MARKER, sole_writer

BATCH_TOKENS = 4096  # tokens per batch of the model

COMMIT_SECONDS = 5.0
"""Seconds between two commits: the most work that an interruption can lose."""


@dataclasses.dataclass
class BuildProgress:
    """BuildProgress of a build: entries in total, then entries, seconds and model seconds of this process."""

    total: int = 0
    entries: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0


Report = Callable[[BuildProgress], None]


class Writer(Protocol):
    """A destination of entries. windows: the number of committed windows."""

    windows: int
    entries: int

    def add(self, keys: np.ndarray, values: np.ndarray, windows: int) -> None:
        """Add entries, see `EntryWriter.add`."""
        ...

    def commit(self) -> None:
        """Commit the entries, see `EntryWriter.commit`."""
        ...


def manifest_of(
    reader: ContextReader,
    reading: Reading,
    text: tuple[dict[str, object], ...],
    part: int = 1,
    parts: int = 1,
) -> Manifest:
    """Return the manifest of the store of a text, or of one of its parts, that `reader` reads."""
    return Manifest(
        dimension=reader.dimension,
        model=reader.fingerprints["model"],
        tokenizer=reader.fingerprints["tokenizer"],
        key=reader.key,
        reading=reading,
        text=text,
        part=part,
        parts=parts,
    )


def build(
    reader: ContextReader,
    texts: Iterable[str],
    manifest: Manifest,
    folder: Path,
    report: Report = lambda progress: None,
) -> Manifest:
    """Build or resume the store, or part, that `manifest` describes; a finished store is not changed.

    Raises `InputError` if the folder contains another store, another process builds there, or the disk is
    full; entries that were saved before are kept.
    """
    with sole_writer(folder, "the same command resumes it later"):
        begun = begin(folder, manifest)
        if begun.count is not None:
            return begun
        with EntryWriter(folder, begun) as writer:
            write(reader, texts, manifest, writer, report)
            if not writer.entries:
                raise InputError(f"{folder}: the text is too short: an entry requires two tokens")
            return writer.finish()


def begin(folder: Path, manifest: Manifest, known: tuple[str, ...] = ()) -> Manifest:
    """Return the manifest in `folder`; if there is none, write `manifest` first.

    known: other names that the folder may contain.
    """
    if not is_begun(folder, MANIFEST, known):
        begun = dataclasses.replace(manifest, block=block_entries(manifest.dimension))
        begun.write(folder)
        return begun
    begun = Manifest.read(folder)
    begun.check_same(manifest, folder)
    if begun.count is not None:
        (folder / PROGRESS).unlink(missing_ok=True)  # left by a build that was killed after its last step
    return begun


def is_begun(folder: Path, about: str, known: tuple[str, ...] = ()) -> bool:
    """Return whether `folder` has its description; raise `InputError` if it has anything else.

    about: the name of the description. known: other names that the folder may contain.
    """
    remove_partials(folder)
    if (folder / about).exists():
        return True
    others = {path.name for path in folder.iterdir()} - {LOCK, MARKER, *known}
    if others:
        raise InputError(f"{folder}: contains something else ({min(others)}); choose another --out")
    return False


def write(
    reader: ContextReader,
    texts: Iterable[str],
    manifest: Manifest,
    writer: Writer,
    report: Report,
) -> None:
    """Read the remaining windows and add their entries."""
    own = (
        window
        for window in windows(reader.documents(texts), manifest.reading)
        if window.number % manifest.parts == manifest.part - 1
    )
    size = max(1, BATCH_TOKENS // manifest.reading.length)
    progress, start = BuildProgress(writer.entries), time.monotonic()
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
    """Yield the windows after the first `done`, in batches of `size` that do not depend on `done`."""
    while batch := list(itertools.islice(own, size)):
        if done:
            assert done >= len(batch), "whole batches count"
            done -= len(batch)
            continue
        yield batch


def keys_of(reader: ContextReader, batch: list[Window]) -> np.ndarray:
    """Return the keys [n, D] of all entries of a batch, in float16."""
    keys = []
    for group in equally_long(batch):
        read, _ = reader.read(*tensors(reader, group))
        keys += [rows[window.carried :] for window, rows in zip(group, read)]
    halves = torch.cat(keys).half().cpu()
    if not bool(halves.isfinite().all()):
        raise InputError(f"{reader.folder}: keys are not finite in float16, the number format of a store")
    return halves.numpy()


def equally_long(batch: list[Window]) -> Iterator[list[Window]]:
    """Yield groups of consecutive windows of equal length: the first and the last window may be shorter."""
    for _, group in itertools.groupby(batch, key=lambda window: len(window.ids)):
        yield list(group)


def tensors(reader: ContextReader, group: list[Window]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the ids [B, T] and documents [B, T] for `ContextReader.read`, on the model's device."""
    device = next(reader.model.parameters()).device
    ids = torch.from_numpy(np.stack([window.ids[:-1] for window in group])).long().to(device)
    if not reader.isolated:
        return ids, None
    documents = np.stack([window.documents[:-1] for window in group]).astype(np.int64)
    return ids, torch.from_numpy(documents - documents[:, :1]).to(device)
