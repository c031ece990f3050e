"""A store: built from a text, and read when it is finished.

A text is read with a model, and each token becomes an entry. A build resumes after any interruption. Windows
are batched identically in every run, so that an interrupted build produces the same keys as an uninterrupted
build. Each of several parts reads the windows with `number % parts == part - 1`.

The parts of STORE must be its subfolders STORE/part-1-of-4 and so on, regardless of the machine that built
them. Merged, they are identical to a single build.

A finished store has memory-mapped entries, an optional index, and the search.
"""

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.entries import (
    MANIFEST,
    PROGRESS,
    Checks,
    EntryWriter,
    Manifest,
    block_entries,
    checks,
    mapped_entries,
)
from polyformer.applications.retrieval.readers import ContextReader, Reading, Window, windows
from polyformer.applications.retrieval.search import Index, nearest, squared_distances
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import read_json, remove_partials, write_json
from polyformer.core.paths import checked_path
from polyformer.core.ranges import PositiveFloat, PositiveInt, Share
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


PART = re.compile(r"part-(\d+)-of-(\d+)")


def part_folder(folder: Path, part: int, parts: int) -> Path:
    """Return the folder in which a part of the store in `folder` is built."""
    return folder / f"part-{part}-of-{parts}" if parts > 1 else folder


def merge(folder: Path, report: Report = lambda progress: None) -> Manifest:
    """Merge the parts in `folder` into one store; it resumes after any interruption.

    Raises `InputError` for parts that are missing, unfinished, damaged or built from other input than the
    rest.
    """
    manifests = parts_of(folder)
    mapped = [mapped_entries(folder / name, manifest) for name, manifest in manifests.items()]
    checked = [
        checks(folder / name, manifest, entries)
        for (name, manifest), entries in zip(manifests.items(), mapped)
    ]
    first = next(iter(manifests.values()))
    whole = dataclasses.replace(first, part=1, parts=1, count=None, block=None)
    with sole_writer(folder, "the same command resumes it later"):
        begun = begin(folder, whole, known=tuple(manifests))
        if begun.count is not None:
            return begun
        with EntryWriter(folder, begun) as writer:
            write_merged(mapped, checked, whole.reading.fresh, writer, report)
            return writer.finish()


def parts_of(folder: Path) -> dict[str, Manifest]:
    """Return the manifests of all parts in `folder`, in order, by the names of their folders."""
    names = [path.name for path in folder.glob("part-*") if PART.fullmatch(path.name)]
    if not names:
        raise InputError(
            f"{folder}: no parts in it; build them by polyformer datastore build ... --out {folder} "
            "--part I --parts N"
        )
    manifests = {name: Manifest.read(folder / name) for name in sorted(names, key=part_number)}
    first = next(iter(manifests.values()))
    for name, manifest in manifests.items():
        if manifest.count is None:
            raise InputError(f"{folder / name}: not finished; resume its build")
        dataclasses.replace(first, part=manifest.part).check_same(manifest, folder / name)
    missing = set(range(1, first.parts + 1)) - {manifest.part for manifest in manifests.values()}
    if missing or len(manifests) != first.parts:
        raise InputError(f"{folder}: of {first.parts} parts, missing: {sorted(missing)}")
    return manifests


def part_number(name: str) -> int:
    """Return I of part-I-of-N."""
    return int(name.split("-")[1])


def write_merged(
    mapped: list[tuple[np.ndarray, np.ndarray]],
    checked: list[Checks],
    fresh: int,
    writer: EntryWriter,
    report: Report,
) -> None:
    """Copy the windows in order, each from the part that has read it, and compare them with its checksums."""
    total = sum(len(values) for _, values in mapped)
    committed = start = time.monotonic()
    before = writer.entries
    for window in range(writer.windows, -(-total // fresh)):
        keys, values = mapped[window % len(mapped)]
        row = window // len(mapped) * fresh
        checked[window % len(mapped)].check_until(row + fresh)
        writer.add(keys[row : row + fresh], values[row : row + fresh], 1)
        now = time.monotonic()
        if now - committed > COMMIT_SECONDS:
            writer.commit()
            report(BuildProgress(writer.entries, writer.entries - before, now - start))
            committed = now
    if writer.entries != total:
        raise InputError(
            f"{writer.folder}: its parts do not form a store: they have {total:,} entries in total"
        )


MIXTURE = "mixture.json"
Search = Literal["auto", "flat", "index"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig(Config):
    """Options of a mixture, tuned on validation text: `weight` is the paper's lambda, `neighbours` its k."""

    weight: Share = 0.25
    temperature: PositiveFloat = 1.0
    neighbours: PositiveInt = 1024

    @classmethod
    def chosen(
        cls,
        remembered: "MixtureConfig | None",
        weight: float | None,
        temperature: float | None,
        neighbours: int | None,
        flag: str = "--temperature",
    ) -> Self:
        """Return the user's options, completed by the store's; raises `InputError` if any is missing."""
        if remembered is None and (weight is None or temperature is None):
            raise InputError(
                f"--lambda, {flag}: expected both, or a store that remembers them from "
                "polyformer evaluate --datastore STORE --tune TEXT"
            )
        asked = {"weight": weight, "temperature": temperature, "neighbours": neighbours}
        known = {} if remembered is None else remembered.to_dict()
        return cls(**{**known, **{name: value for name, value in asked.items() if value is not None}})


class Neighbours(NamedTuple):
    """The nearest entries of some queries."""

    distances: Tensor  # [N, k], squared and exact, nearest first; infinite for missing neighbours
    values: Tensor  # [N, k], the next tokens


class Store(Protocol):
    """The interface of a store, in a folder or on a server."""

    @property
    def manifest(self) -> Manifest:
        """Return the description of the store."""
        ...

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the entries nearest to queries [N, D]; all entries if there are fewer than `neighbours`."""
        ...

    def mixture(self) -> MixtureConfig | None:
        """Return the saved options of the mixture, if any."""
        ...

    def keep_mixture(self, config: MixtureConfig) -> None:
        """Save options of the mixture; raises `InputError` if the store cannot be written."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class FolderStore:
    """A store in a folder. keys: [M, D] float16. values: [M] int32. Without `index`, search is exhaustive."""

    folder: Path
    manifest: Manifest
    keys: np.ndarray
    values: np.ndarray
    index: Index | None = None

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries, see `Store.search`."""
        distances, rows = self.entries(queries, neighbours)
        values = torch.from_numpy(self.values[rows.clamp_min(0).cpu().numpy()].astype(np.int64))
        return Neighbours(distances, values.to(queries.device))

    def mixture(self) -> MixtureConfig | None:
        """Return the saved mixture, see `Store.mixture`."""
        file = self.folder / MIXTURE
        return MixtureConfig.from_dict(read_json(file, dict)) if file.exists() else None

    def keep_mixture(self, config: MixtureConfig) -> None:
        """Save the mixture, see `Store.keep_mixture`."""
        write_json(self.folder / MIXTURE, config.to_dict())

    def entries(self, queries: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """Search like `search`, but return the row numbers of the entries; -1 for missing neighbours."""
        if self.index is None:
            return nearest(queries, self.keys, neighbours)
        return self._reranked(queries, min(neighbours, len(self.keys)), self.index)

    def _reranked(self, queries: Tensor, neighbours: int, index: Index) -> tuple[Tensor, Tensor]:
        """Return the candidates of the index in the order of their exact distances."""
        rows = index.candidates(queries, neighbours)
        distances, order = squared_distances(queries, self.keys, rows).sort(1)
        return distances[:, :neighbours], rows.gather(1, order)[:, :neighbours]


def open_folder(folder: Path, search: Search = "auto") -> FolderStore:
    """Open the store in `folder`, for any number of processes; raises `InputError` if it cannot be used.

    Some of its blocks are compared with their checksums: see `polyformer.applications.retrieval.entries`.
    """
    if not checked_path(folder).is_dir():
        raise InputError(f"{folder}: no such datastore; build it with polyformer datastore build")
    manifest = Manifest.read(folder)
    if manifest.count is None:
        state = " (interrupted)" if (folder / PROGRESS).exists() else ""
        raise InputError(f"{folder}: not finished{state}; resume it with the same polyformer datastore build")
    if manifest.parts > 1:
        raise InputError(
            f"{folder}: part {manifest.part} of {manifest.parts}; join the parts with polyformer "
            "datastore merge"
        )
    keys, values = mapped_entries(folder, manifest)
    checks(folder, manifest, (keys, values)).check_sample()
    index = None if search == "flat" else Index.read(folder, manifest)
    if search == "index" and index is None:
        raise InputError(f"{folder}: it has no index; make it with polyformer datastore index {folder}")
    return FolderStore(folder, manifest, keys, values, index)


def verify(folder: Path) -> Manifest:
    """Compare all entries of a store or part, and its index, with their checksums; return its manifest.

    Raises `InputError` if it is damaged or unfinished. For a store without checksums only sizes are compared.
    """
    manifest = Manifest.read(folder)
    if manifest.count is None:
        raise InputError(f"{folder}: not finished; resume it with the same polyformer datastore build")
    checks(folder, manifest, mapped_entries(folder, manifest)).check_all()
    Index.read(folder, manifest)
    return manifest
