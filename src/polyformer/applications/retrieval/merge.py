"""Merging of parts that several processes have built: the result is identical to a single build.

The parts of STORE must be its subfolders STORE/part-1-of-4 and so on, regardless of the machine that built
them.
"""

import dataclasses
import re
import time
from pathlib import Path

import numpy as np

from polyformer.applications.retrieval.build import COMMIT_SECONDS, BuildProgress, Report, begin
from polyformer.applications.retrieval.checksums import Checks
from polyformer.applications.retrieval.entries import EntryWriter, checks, mapped_entries
from polyformer.applications.retrieval.manifest import Manifest
from polyformer.core.errors import InputError
from polyformer.training.run_control import sole_writer

NAME = re.compile(r"part-(\d+)-of-(\d+)")


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
            write(mapped, checked, whole.reading.fresh, writer, report)
            return writer.finish()


def parts_of(folder: Path) -> dict[str, Manifest]:
    """Return the manifests of all parts in `folder`, in order, by the names of their folders."""
    names = [path.name for path in folder.glob("part-*") if NAME.fullmatch(path.name)]
    if not names:
        raise InputError(
            f"{folder}: no parts in it; build them by polyformer datastore build ... --out {folder} "
            "--part I --parts N"
        )
    manifests = {name: Manifest.read(folder / name) for name in sorted(names, key=number)}
    first = next(iter(manifests.values()))
    for name, manifest in manifests.items():
        if manifest.count is None:
            raise InputError(f"{folder / name}: not finished; resume its build")
        dataclasses.replace(first, part=manifest.part).check_same(manifest, folder / name)
    missing = set(range(1, first.parts + 1)) - {manifest.part for manifest in manifests.values()}
    if missing or len(manifests) != first.parts:
        raise InputError(f"{folder}: of {first.parts} parts, missing: {sorted(missing)}")
    return manifests


def number(name: str) -> int:
    """Return I of part-I-of-N."""
    return int(name.split("-")[1])


def write(
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
