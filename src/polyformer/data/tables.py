"""Readers of tables: comma-, semicolon- and tab-separated values, and JSON as lines or as one list.

Not the readers of `datasets`: those fill short CSV rows with None, read "01" as a number and "NA" as None,
name neither file nor line of damaged JSON, and write a copy of the data into a cache.
"""

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.limits import JSON_BYTES
from polyformer.core.parsing import parse_json
from polyformer.data.compressed_files import lines_of, opened

Row = dict[str, Any]
Header = Sequence[str] | None

DELIMITERS = (",", ";", "\t")
"""Possible field separators of a CSV file; spreadsheets write `;` where a comma is the decimal separator."""

SAMPLE = 100
"""Lines from which the delimiter is detected."""

_EXPECTED = "; expected an object on each line, or one list of objects"


def read_jsonl(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield a row per JSON object: one per line, or one list of objects; its keys are the columns."""
    with opened(path) as file:
        lines = lines_of(file, path)
        filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        first = next(filled, None)
        if first is not None and first[1].lstrip().startswith("["):
            yield from _objects(path, first[1] + file.read(JSON_BYTES + 1))
            return
        for number, line in itertools.chain([first] if first else [], filled):
            yield parse_json(line, f"{path}, line {number}", dict, finite=False, way_out=_EXPECTED)


def _objects(path: Path, text: str) -> Iterator[Row]:
    for number, row in enumerate(parse_json(text, path, list, finite=False, way_out=_EXPECTED), 1):
        if not isinstance(row, dict):
            raise InputError(f"{path}, element {number}: expected an object, got {quote(row)}")
        yield row


def read_csv(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield the rows of delimited values with quoting; the first line is the header unless given.

    The delimiter is detected (see `delimiter_of`). Quoted fields may contain line breaks.
    """
    with opened(path) as file:
        delimiter, lines = _detected(lines_of(file, path))
        records = csv.reader(lines, strict=True, delimiter=delimiter)
        try:
            yield from _table(path, ((records.line_num, fields) for fields in records if fields), header)
        except csv.Error as error:
            raise InputError(f"{path}, line {records.line_num}: not CSV ({error})") from error


def read_tsv(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield the rows of tab-separated values without quoting; the first line is the header unless given."""
    with opened(path) as file:
        lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(lines_of(file, path), 1))
        yield from _table(path, ((number, line.split("\t")) for number, line in lines if line), header)


def first_records(path: Path, format: str, most: int) -> tuple[list[list[str]], str]:
    """Return the first `most` records of a csv or tsv file, including a header, and its delimiter.

    Of a damaged CSV file it returns the records before the damage, which the reader reports.
    """
    records: list[list[str]] = []
    with opened(path) as file:
        lines = lines_of(file, path)
        if format == "tsv":
            rows = (line.rstrip("\r\n") for line in lines)
            return [row.split("\t") for row in itertools.islice(filter(None, rows), most)], "\t"
        delimiter, lines = _detected(lines)
        try:
            for record in itertools.islice(filter(None, csv.reader(lines, delimiter=delimiter)), most):
                records.append(record)
        except csv.Error:
            pass
    return records, delimiter


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


def _detected(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """Return the delimiter of a CSV file, and its lines, including the sampled lines."""
    sample = list(itertools.islice(lines, SAMPLE))
    return delimiter_of(sample), itertools.chain(sample, lines)


def _table(path: Path, lines: Iterable[tuple[int, list[str]]], header: Header) -> Iterator[Row]:
    numbered = iter(lines)
    names = list(header) if header is not None else next(numbered, (0, []))[1]
    for number, fields in numbered:
        if len(fields) != len(names):
            raise InputError(
                f"{path}, line {number}: {len(fields)} fields where {len(names)} columns are expected "
                f"({', '.join(names):.80})"
            )
        yield dict(zip(names, fields))
