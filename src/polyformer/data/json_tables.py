"""Tables in a single JSON document, as pandas writes them.

    [{"text": "a"}, {"text": "b"}]                                     records
    {"text": {"0": "a", "1": "b"}}                                     columns, the default
    {"0": {"text": "a"}, "1": {"text": "b"}}                           index
    {"columns": ["text"], "index": [0, 1], "data": [["a"], ["b"]]}     split
    {"schema": {...}, "data": [{"index": 0, "text": "a"}, ...]}        table

Row numbers are left out. Without row numbers an object of objects could be columns or rows, and is refused.
"""

from typing import Any

from polyformer.core.errors import InputError, quote

Row = dict[str, Any]

_RECORDS = "write its rows as objects, with pandas df.to_json(orient='records', lines=True)"


def list_rows(elements: list[Any], path: object) -> list[Row]:
    """Return the rows of a list; raises `InputError` for an element that is no object."""
    for number, row in enumerate(elements, 1):
        if not isinstance(row, dict):
            way = f"; {_RECORDS}" if isinstance(row, list) else ""
            raise InputError(f"{path}, element {number}: expected an object, got {quote(row)}{way}")
    return elements


def table_rows(document: Row, path: object) -> list[Row] | None:
    """Return the rows of a document that is a table, or None for any other object.

    Raises `InputError` for an object of objects that could be columns or rows.
    """
    columns, data = document.get("columns"), document.get("data")
    if (
        isinstance(columns, list)
        and isinstance(data, list)
        and document.keys() <= {"columns", "index", "data"}
    ):
        return _split_rows(columns, data, path)
    schema = document.get("schema")
    if isinstance(schema, dict) and isinstance(data, list):
        return _without(list_rows(data, path), schema.get("primaryKey"))
    return _nested_rows(document, path)


def _split_rows(columns: list[Any], data: list[Any], path: object) -> list[Row]:
    names = [str(name) for name in columns]
    for number, values in enumerate(data, 1):
        if not isinstance(values, list) or len(values) != len(names):
            raise InputError(
                f"{path}, element {number} of data: expected {len(names)} values ({', '.join(names):.80}), "
                f"got {quote(values)}"
            )
    return [dict(zip(names, values)) for values in data]


def _without(rows: list[Row], keys: object) -> list[Row]:
    """Return rows without the columns of row numbers, the primary key of a schema."""
    left_out = {*keys} if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else set()
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


def _nested_rows(document: Row, path: object) -> list[Row] | None:
    """Return the rows of an object of objects with equal names: a row for each number."""
    inner = [*document.values()]
    if not inner or not all(isinstance(values, dict) and values for values in inner):
        return None
    if any(values.keys() != inner[0].keys() for values in inner):
        return None
    if _are_numbers(inner[0]):
        return [{name: values[number] for name, values in document.items()} for number in inner[0]]
    if _are_numbers(document):
        return inner
    if len(document) > 1:
        raise InputError(
            f"{path}: an object of objects, and neither the names {quote([*document])} nor "
            f"{quote([*inner[0]])} are row numbers, so that either could be the columns; {_RECORDS}"
        )
    return None


def _are_numbers(names: Row) -> bool:
    """Return whether all names are row numbers."""
    return all(name.isdecimal() for name in names)
