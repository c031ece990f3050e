"""Held-out rows whose input also occurs in the training rows, so that a metric measures memory.

Inputs are compared by hashes, exactly and without case, spaces and punctuation. Only the hashes of the
held-out rows are stored. Of long data only the beginning is compared, and the note says how much.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyformer.data.normalization import normalized
from polyformer.data.origins import has_validation
from polyformer.data.prepared.text import is_prepared_source
from polyformer.data.sources import DataConfig, Splits, load

INPUTS = {
    ("source",): "source",
    ("context",): "context",
    ("text", "pair"): "pair of texts",
    ("text",): "text",
    ("tokens",): "sentence",
    ("image",): "image",
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
        most = STREAMED if config.streaming or is_prepared_source(config.path) else IN_MEMORY
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
