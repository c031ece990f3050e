"""Checks of the data of a run: held-out rows that are in the training data, and data that have changed.

If an input of the held-out rows also occurs in the training rows, a metric measures memory. Inputs are
compared by hashes, exactly and without case, spaces and punctuation. Only the hashes of the held-out rows are
stored. Of long data only the beginning is compared, and the note says how much.

A resumed run detects by fingerprints whether the data have changed. They contain the size of every file and
the SHA-256 of its bytes. Of a file larger than `WHOLE` bytes, only evenly spaced blocks are hashed, because
reading all of it might take longer than the remaining training.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyformer.core.files import open_file
from polyformer.data.formats.images import IMAGE, labels_file
from polyformer.data.sources.held_out import normalized
from polyformer.data.sources.libraries import default_documents
from polyformer.data.sources.origins import has_validation, kind_of_source, source_files
from polyformer.data.sources.splits import DataConfig, Splits, load

INPUTS = {
    ("source",): "source",
    ("context",): "context",
    ("text", "pair"): "pair of texts",
    ("text",): "text",
    ("tokens",): "sentence",
    ("image",): "image",
    ("conversation",): "conversation",
    ("chosen",): "preference",
}
"""The columns that a model reads, with their name; the first that a task needs are compared."""

IN_MEMORY, STREAMED = 2**24, 2**21
"""The most characters (or bytes of images) of a split that are compared."""

BATCH = 64  # rows that are read at once


@dataclass(frozen=True)
class Overlap:
    """Held-out rows, and how many of them occur among the training rows.

    exact: with the same input. near: with the same input except for case, spaces and punctuation. trained:
    the training rows that were compared. complete: whether both splits were compared to their ends.
    """

    held: int
    exact: int
    near: int
    trained: int
    complete: bool

    def describe(self, split: str, what: str) -> str:
        """Return the counts in a line."""
        both = self.exact + self.near
        part = "" if self.complete else f", compared with the first {self.trained:,}"
        return (
            f"{split}: {both:,} of {self.held:,} held-out rows ({100 * both / self.held:.1f} %) repeat a "
            f"{what} of the training rows{part}: {self.exact:,} exactly"
            + (f", {self.near:,} except for case, spaces and punctuation" if self.near else "")
        )


def overlaps(
    config: DataConfig, splits: Splits, needs: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the overlap of each held-out split with the training rows, and a line for each that has any.

    The lines name the option that keeps equal inputs on one side, if the splits are not separate sources.
    """
    columns = next((columns for columns in INPUTS if {*columns} <= {*needs}), None)
    if columns is None:
        return {}, []
    if config.streaming:
        splits = load(config, needs)  # new streams: those of the training keep their state
    counts, notes = {}, []
    for split in ("validation", "test"):
        held = getattr(splits, split)
        if held is None:
            continue
        most = STREAMED if config.streaming or kind_of_source(config.path) == "prepared" else IN_MEMORY
        overlap = count(_inputs(splits.train, columns), _inputs(held, columns), most)
        counts[split] = asdict(overlap)
        if overlap.exact + overlap.near:
            separate = getattr(config, split) is not None or has_validation(config.path)
            way = "" if separate or config.together else _way(columns[0])
            notes.append(overlap.describe(split, INPUTS[columns]) + way)
    return counts, notes


def _way(column: str) -> str:
    return f" (--data.together {column} keeps all rows with the same {column} on one side)"


def count(train: Iterable[tuple[Any, ...]], held: Iterable[tuple[Any, ...]], most: int) -> Overlap:
    """Return the overlap of two iterables of inputs; `most` characters of each are compared."""
    known: dict[int, dict[int, int]] = {}
    rows, trained = _FirstRows(held, most), _FirstRows(train, most)
    for near, exact in map(hashes, rows):
        counts = known.setdefault(near, {})
        counts[exact] = counts.get(exact, 0) + 1
    near_seen, exact_seen = set[int](), set[int]()
    for near, exact in map(hashes, trained):
        if near in known:
            near_seen.add(near)
            exact_seen.add(exact)
    both = sum(sum(known[near].values()) for near in near_seen)
    same = sum(n for near in near_seen for exact, n in known[near].items() if exact in exact_seen)
    return Overlap(rows.count, same, both - same, trained.count, not (rows.cut or trained.cut))


class _FirstRows:
    """The first of `inputs`, up to `most` characters in total; `count` and `cut` are set by the iteration."""

    def __init__(self, inputs: Iterable[tuple[Any, ...]], most: int):
        self.inputs, self.left, self.count, self.cut = inputs, most, 0, False

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for values in self.inputs:
            if self.left <= 0:
                self.cut = True
                return
            self.left -= sum(map(len, values))
            self.count += 1
            yield values


def _inputs(rows: Any, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of `columns` of every row."""
    if hasattr(rows, "select_columns"):
        for batch in rows.select_columns(list(columns)).iter(BATCH):
            yield from zip(*(batch[column] for column in columns))
    else:
        yield from (tuple(row[column] for column in columns) for row in rows)


def hashes(values: tuple[Any, ...]) -> tuple[int, int]:
    """Return the hash of the normalized values, and of the values themselves."""
    return hash(tuple(map(normalized, values))), hash(tuple(map(_plain, values)))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


WHOLE = 1 << 30
BLOCKS, BLOCK = 256, 1 << 20

Fingerprint = dict[str, list[dict[str, Any]]]
"""By role (path, validation, test): file, bytes and sha256 of each file, in order."""


def fingerprint(config: DataConfig, needs: Sequence[str]) -> Fingerprint:
    """Return the fingerprint of the data in `config`, read for `needs` as by `sources.splits.load`.

    Data sets of the hub and the default images have no fingerprint.
    """
    sources = {"path": config.path, "validation": config.validation, "test": config.test}
    files_of = {role: source_files(source) for role, source in sources.items() if source is not None}
    if "label" in needs:
        for files in files_of.values():
            files += filter(None, map(labels_file, list(files)))
    prints = {role: [of_file(file) for file in files] for role, files in files_of.items()}
    return {"path": [_of_default()], **prints} if config.path is None and IMAGE not in needs else prints


def data_changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return descriptions of the changes from `before` to `now`; paths and names of files are ignored."""
    changes: list[str] = []
    for role, files in before.items():
        others = now.get(role, [])
        if files and others and len(files) != len(others):
            changes.append(f"{role}: {len(files)} files, now {len(others)}")
        for old, new in zip(files, others):
            if old["bytes"] != new["bytes"]:
                changes.append(f"{new['file']}: {old['bytes']:,} bytes, now {new['bytes']:,}")
            elif old["sha256"] != new["sha256"]:
                changes.append(f"{new['file']}: other content, of the same size")
    return changes


def of_file(path: Path) -> dict[str, Any]:
    """Return the name, size and digest of a file: see the module."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open_file(path) as file:
        if size <= WHOLE:
            digest = hashlib.file_digest(file, "sha256")
        else:
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                digest.update(file.read(BLOCK))
    return {"file": str(path), "bytes": size, "sha256": digest.hexdigest()}


def _of_default() -> dict[str, Any]:
    text = "\0".join(default_documents()).encode()
    return {"file": "the default text", "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
