"""Tables with a column that says which rows are for training, validation and test."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from polyformer.core.errors import InputError, quote

Row = dict[str, Any]

COLUMN = "split"
"""The usual name of the column, in upper or lower case."""

PARTS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "development"),
    "test": ("test", "testing"),
}
"""The values for each part, in upper or lower case."""

FIRST = 500
"""Rows whose values decide whether the column names parts."""

_PART_OF = {value: part for part, values in PARTS.items() for value in values}


def part_of(value: object) -> str | None:
    """Return the part that a value names; None for any other value."""
    return _PART_OF.get(value.strip().lower()) if isinstance(value, str) else None


def named_parts(rows: Iterable[Row], column: str, source: str) -> list[str]:
    """Return the parts that the column names: at least two, with "train"; an empty list for another column.

    Reads all rows, or until all parts occur. Raises `InputError` if only some values are parts.
    """
    rows = iter(rows)
    values = [row.get(column) for row in itertools.islice(rows, FIRST)]
    if not any(map(part_of, values)):
        return []
    present: set[str] = set()
    for value in itertools.chain(values, (row.get(column) for row in rows)):
        part = part_of(value)
        if part is None:
            raise InputError(f"{source}: {_unknown(column, value)}")
        present.add(part)
        if len(present) == len(PARTS):
            break
    return [part for part in PARTS if part in present] if len(present) > 1 and "train" in present else []


def rows_of_part(rows: Iterable[Row], column: str, part: str, source: str) -> Iterator[Row]:
    """Yield the rows of a part; raises `InputError` for a missing column, another value, or no such row."""
    empty = True
    for number, row in enumerate(rows, 1):
        if column not in row:
            raise InputError(
                f"{source}, row {number}: no column {quote(column)}, which split names; it has "
                f"{', '.join(map(quote, row)) or 'none'}"
            )
        named = part_of(row[column])
        if named is None:
            raise InputError(f"{source}, row {number}: {_unknown(column, row[column])}")
        if named == part:
            empty = False
            yield row
    if empty:
        raise InputError(
            f"{source}: no row has {quote(part)} in the column {quote(column)}; name another "
            f"{part} source, or set split to null to use all rows"
        )


def _unknown(column: str, value: object) -> str:
    return (
        f"column {quote(column)} holds {quote(value)}, expected train, validation or test; correct the rows, "
        "or use all of them for training with --data.split null"
    )
