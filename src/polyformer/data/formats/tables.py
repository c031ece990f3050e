"""Tables: lines of values, JSON lines, and a table in one JSON document.

A single JSON document, as pandas writes it, has one of these forms:

    [{"text": "a"}, {"text": "b"}]                                     records
    {"text": {"0": "a", "1": "b"}}                                     columns, the default
    {"0": {"text": "a"}, "1": {"text": "b"}}                           index
    {"columns": ["text"], "index": [0, 1], "data": [["a"], ["b"]]}     split
    {"schema": {...}, "data": [{"index": 0, "text": "a"}, ...]}        table

Row numbers are left out. Without row numbers an object of objects could be columns or rows, and is refused.

Values are separated by commas, semicolons or tabs, and JSON has a row per line or is one list. The readers of
`datasets` are not used: those fill short CSV rows with None, read "01" as a number and "NA" as None,
name neither file nor line of damaged JSON, and write a copy of the data into a cache.
"""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from polyformer.core.errors import InputError, quote
from polyformer.core.parsing import parse_json
from polyformer.core.ranges import JSON_BYTES
from polyformer.data.sources.files import lines_of, opened

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


Header = Sequence[str] | None

DELIMITERS = (",", ";", "\t", "|")
"""Possible field separators of a CSV file; spreadsheets write `;` where a comma is the decimal separator."""

SAMPLE = 100
"""Lines from which the delimiter is detected."""

TABBED = 500
"""Lines of a text in which tabs are counted."""

QUOTED = 10_000
"""Lines in which quoted fields of a tab-separated file are looked for."""

QUOTED_CHARACTERS = 2**24
"""Characters in which quoted fields are looked for."""

_DOUBLED = re.compile(r'"(?=.*"".*")([^"]|"")*"')
_ENCLOSED = re.compile(r'"([^"]|"")*"|')
_NUMBER = re.compile(r"[-+]?[\d.]+([eE][-+]?\d+)?")
_EXPECTED = "; expected an object on each line, or one list of objects"
_STATED = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # the first line of a CSV file for Excel


def read_jsonl(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield a row per JSON object: one per line, or one list of objects; its keys are the columns.

    A file may also be a table in a single object (`table_rows`).
    """
    with opened(path) as file:
        lines = enumerate(lines_of(file, path), 1)
        filled = ((number, line) for number, line in lines if line.strip())
        first = list(itertools.islice(filled, 2))
        if len(first) == 1 or (first and first[0][1].strip().startswith("[")) or _is_open(first):
            yield from _document_rows(path, first, file)
            return
        for number, line in itertools.chain(first, filled):
            yield parse_json(line, f"{path}, line {number}", dict, finite=False, way_out=_EXPECTED)


def _is_open(first: list[tuple[int, str]]) -> bool:
    """Return whether the first line ends within an object."""
    return bool(first) and first[0][1].rstrip().endswith(("{", "[", ",", ":"))


def _document_rows(path: Path, first: list[tuple[int, str]], file: TextIO) -> list[Row]:
    """Return the rows of a file that is one JSON text, beginning with the lines `first`."""
    text = "".join(line for _, line in first) + file.read(JSON_BYTES + 1)
    if text.lstrip().startswith("["):
        return list_rows(parse_json(text, path, list, finite=False, way_out=_EXPECTED), path)
    number, line = first[0]
    where = f"{path}, line {number}"
    if len(first) == 1:
        row = parse_json(line, where, dict, finite=False, way_out=_EXPECTED)
        rows = table_rows(row, path)
        return [row] if rows is None else rows
    try:
        document = parse_json(text, path, dict, finite=False)
    except InputError:
        document = {}
    rows = table_rows(document, path)
    if rows is None:
        # An object over several lines is no row: report its first line.
        parse_json(line, where, dict, finite=False, way_out=_EXPECTED)
        raise InputError(f"{where}: not JSON lines{_EXPECTED}")
    return rows


class _Layout(NamedTuple):
    """The layout of a table. above: lines before the header or the first row."""

    delimiter: str
    above: int
    lines: Iterator[str]  # from the header on


def read_csv(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield the rows of delimited values with quoting; the first line is the header unless given.

    The delimiter is detected (see `delimiter_of`). Quoted fields may contain line breaks. Comments above the
    header, Excel's `sep=;` and rows without content are left out.
    """
    with opened(path) as file:
        layout = _csv_layout(lines_of(file, path))
        records = csv.reader(layout.lines, strict=True, delimiter=layout.delimiter)
        try:
            yield from _table(path, ((records.line_num + layout.above, row) for row in records), header)
        except csv.Error as error:
            line = records.line_num + layout.above
            raise InputError(f"{path}, line {line}: not CSV ({error})") from error


def read_tsv(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield the rows of tab-separated values without quoting; the first line is the header unless given.

    Comments above the header and rows without content are left out.
    """
    with opened(path) as file:
        layout = _tsv_layout(lines_of(file, path))
        lines = enumerate(layout.lines, layout.above + 1)
        yield from _table(path, ((number, line.rstrip("\r\n").split("\t")) for number, line in lines), header)


def first_records(path: Path, format: str, most: int) -> tuple[list[list[str]], str]:
    """Return the first `most` records of a csv or tsv file, including a header, and its delimiter.

    Of a damaged CSV file it returns the records before the damage, which the reader reports.
    """
    records: list[list[str]] = []
    with opened(path) as file:
        lines = lines_of(file, path)
        if format == "tsv":
            rows = (line.rstrip("\r\n").split("\t") for line in _tsv_layout(lines).lines)
            return list(itertools.islice(filter(any, rows), most)), "\t"
        layout = _csv_layout(lines)
        try:
            for record in itertools.islice(
                filter(any, csv.reader(layout.lines, delimiter=layout.delimiter)), most
            ):
                records.append(record)
        except csv.Error:
            pass
    return records, layout.delimiter


def has_tabs(path: Path) -> bool:
    """Return whether the first lines all have the same number of tabs, at least one."""
    with opened(path) as file:
        lines = itertools.islice(lines_of(file, path), TABBED)
        counts = {line.count("\t") for line in lines if line.strip()}
    return len(counts) == 1 and min(counts) > 0


def has_quotes(path: Path) -> bool:
    """Return whether fields of a tab-separated file are quoted as in CSV, judged by its first lines.

    Quotation marks may also belong to the text. They quote a field if they enclose doubled marks, a tab or a
    line break, or if they enclose every field that is no number.
    """
    with opened(path) as file:
        lines, cut = _first_lines(_tsv_layout(lines_of(file, path)).lines)
    rows = [line.rstrip("\r\n").split("\t") for line in lines if line.strip()]
    cells = [cell for row in rows for cell in row]
    if not any(cell.startswith('"') for cell in cells):
        return False
    try:
        records = [record for record in csv.reader(lines, delimiter="\t", strict=not cut) if record]
    except csv.Error:
        return False
    widths = {*map(len, records[: len(records) - cut])}  # the last record may end within quotes
    if len(widths) != 1 or widths == {1}:
        return False
    if widths != {*map(len, rows)} or any(map(_DOUBLED.fullmatch, cells)):
        return True
    return all(_ENCLOSED.fullmatch(cell) or _NUMBER.fullmatch(cell) for cell in cells)


def _first_lines(lines: Iterator[str]) -> tuple[list[str], bool]:
    """Return the lines in which quotes are looked for, and whether there are more."""
    first: list[str] = []
    size = 0
    for line in lines:
        if len(first) == QUOTED or size > QUOTED_CHARACTERS:
            return first, True
        first.append(line)
        size += len(line)
    return first, False


def delimiter_of(lines: Sequence[str]) -> str:
    """Return the first of `DELIMITERS` that splits every record into the same number of fields, above one.

    If there is none, return the delimiter that splits the first record, the header, into most fields.
    """
    counts = {delimiter: _field_counts(lines, delimiter) for delimiter in DELIMITERS}
    regular = [sign for sign in DELIMITERS if len({*counts[sign]}) == 1 and counts[sign][0] > 1]
    return regular[0] if regular else max(DELIMITERS, key=lambda sign: counts[sign][:1])


def _field_counts(lines: Sequence[str], delimiter: str) -> list[int]:
    counts: list[int] = []
    try:
        for record in csv.reader(lines, delimiter=delimiter):
            if record:
                counts.append(len(record))
    except csv.Error:
        return counts
    # The sample may end inside a quoted field.
    return counts[:-1] if len(lines) == SAMPLE and len(counts) > 1 else counts


def _csv_layout(lines: Iterator[str]) -> _Layout:
    sample = list(itertools.islice(lines, SAMPLE))
    stated = _STATED.fullmatch(sample[0].rstrip("\r\n")) if sample else None
    above = 1 if stated else 0
    hashes = sum(1 for _ in itertools.takewhile(_may_be_comment, sample[above:]))
    delimiter = stated[1] if stated else delimiter_of(sample[above + hashes :] or sample[above:])
    above += _comments(sample[above:], lambda line: sum(_field_counts([line], delimiter)))
    return _Layout(delimiter, above, itertools.chain(sample[above:], lines))


def _tsv_layout(lines: Iterator[str]) -> _Layout:
    sample = list(itertools.islice(lines, SAMPLE))
    above = _comments(sample, lambda line: line.count("\t") + 1)
    return _Layout("\t", above, itertools.chain(sample[above:], lines))


def _may_be_comment(line: str) -> bool:
    return line.startswith("#") or not line.strip()


def _comments(lines: Sequence[str], width: Callable[[str], int]) -> int:
    """Return the number of comments `# ...` and blank lines above a table.

    A line with as many fields (`width`) as the first line after the comments is part of the table: `#id,text`
    or a text that begins with a hashtag. In a table of a single column only `# ` begins a comment.
    """
    body = next(itertools.dropwhile(_may_be_comment, lines), None)
    if body is None:
        return 0
    expected = width(body)

    def is_comment(line: str) -> bool:
        if not line.startswith("#"):
            return not line.strip()
        return line.startswith("# ") if width(line) == expected == 1 else width(line) != expected

    return sum(1 for _ in itertools.takewhile(is_comment, lines))


def column_names(cells: Sequence[str]) -> list[str]:
    """Return the names of a header; an empty cell, such as pandas' index, is named `Unnamed: 0` as in pandas.

    Raises `InputError` for a name that occurs twice.
    """
    twice = [name for name, count in Counter(cells).items() if name.strip() and count > 1]
    if twice:
        raise InputError(
            f"two columns have the name {quote(twice[0])}; rename one of them. If the first line is not a "
            "heading, name the columns with header"
        )
    return [name if name.strip() else f"Unnamed: {number}" for number, name in enumerate(cells)]


def _table(path: Path, lines: Iterable[tuple[int, list[str]]], header: Header) -> Iterator[Row]:
    numbered = ((number, fields) for number, fields in lines if any(fields))
    above = 0
    if header is None:
        above, cells = next(numbered, (0, []))
        try:
            header = column_names(cells)
        except InputError as error:
            raise InputError(f"{path}, line {above}: {error}") from None
    names = list(header)
    first = True
    for number, fields in numbered:
        if len(fields) != len(names):
            title = above and first and len(fields) > len(names)
            way = f"; if line {above} is a title above the column names, remove it" if title else ""
            raise InputError(
                f"{path}, line {number}: {len(fields)} fields where {len(names)} columns are expected "
                f"({', '.join(names):.80}){way}"
            )
        if above and len(names) > 1 and fields == names:
            raise InputError(
                f"{path}, line {number}: the column names again, as after joining files; remove this line"
            )
        first = False
        yield dict(zip(names, fields))
