"""Labels of rows: values without white space around them, and rows without a label."""

from collections.abc import Iterable, Iterator
from typing import Any

from polyformer.core.errors import InputError, caution, quote

Row = dict[str, Any]


def stripped(value: Any) -> Any:
    """Return a label without the white space around it."""
    return value.strip() if isinstance(value, str) else value


def is_empty(value: object) -> bool:
    """Return whether a label, or a tag in a list, is None, an empty text or NaN."""
    if isinstance(value, list):
        return any(map(is_empty, value))
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def labelled_rows(numbered: Iterable[tuple[int, Row]], column: str, source: str) -> Iterator[tuple[int, Row]]:
    """Yield the numbered rows without those whose label is empty; a warning at the end counts these.

    Raises `InputError` if all labels are empty.
    """
    empty = labelled = 0
    for number, row in numbered:
        if column in row and is_empty(row[column]):
            empty += 1
            continue
        labelled += 1
        yield number, row
    if empty and not labelled:
        raise InputError(
            f"{source}: column {quote(column)} is empty in every row; expected labels: fill it, or name "
            "another column with columns, as in {label: NAME}"
        )
    if empty:
        rows = "1 row without a label is" if empty == 1 else f"{empty:,} rows without a label are"
        caution(f"{source}: {rows} left out")
