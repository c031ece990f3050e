"""Rows of a Parquet file, with a limit on its expanded size.

A few bytes can expand to gigabytes: pages are compressed, repeated numbers are counts, and a dictionary
stores a long value once that occurs a million times. So the sizes stated in the file are checked before a row
group is read, no batch can exceed `BATCH` bytes, and the expanded bytes are counted.

The sizes are read before anything is decompressed. They are structs in Thrift's compact protocol
(parquet.thrift: `FileMetaData` at the end of the file, a `PageHeader` before each page). pyarrow does not
expose page headers, trusts them when it allocates memory, and aborts the process if the metadata of a column
are inconsistent. Therefore both are parsed here.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from polyformer.core.errors import InputError, reason_of
from polyformer.core.limits import EXPANDED, EXPANSION
from polyformer.data.compressed_files import too_large
from polyformer.data.remote import Remote
from polyformer.data.tables import Row

ROWS, BATCH = 1024, 2**30
"""The most rows per batch, and the most bytes of its values."""

ROW, VALUE = 64, 8
"""Bytes that are counted for every row, and for every value of a list."""

DICTIONARY = 2

HEAD_BYTES = 2**13, 2**24
"""Bytes of a page header that are read first, and at most: it may contain two values of the page."""

NESTING = 16
DELTA_BYTE_ARRAY = 7
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY = (1, 2), 3, (4, 5, 6), 7, 8
_LISTS, _MAP, _STRUCT = (9, 10), 11, 12


class Page(NamedTuple):
    """A page. kind: 0 and 3 contain data, 2 is a dictionary. expanded: bytes after decompression."""

    kind: int
    expanded: int


class Chunk(NamedTuple):
    """A column within a row group, from byte `start` to `stop`. expanded: its bytes after decompression."""

    start: int
    stop: int
    expanded: int
    values: int
    encodings: list[int]


def chunks(file: BinaryIO) -> list[list[Chunk]]:
    """Return the columns of every row group; raises `ValueError` for damaged metadata."""
    end = file.seek(-8, 2)
    size = int.from_bytes(file.read(4), "little")
    if size > end:
        raise ValueError(f"metadata of {size} bytes in a file of {end + 8}")
    file.seek(end - size)
    try:
        groups = _Reader(file.read(size)).struct()[4]
        return [[_chunk(column[3]) for column in group[1]] for group in groups]
    except (IndexError, KeyError, TypeError):
        raise ValueError("metadata without sizes of columns") from None


def _chunk(column: dict[int, Any]) -> Chunk:
    start = min(offset for offset in (column[9], column.get(11, 0)) if offset)
    if min(start, column[5], column[6], column[7]) < 0:
        raise ValueError("a column of a negative size")
    return Chunk(start, start + column[7], column[6], column[5], column[2])


def pages(file: BinaryIO, chunk: Chunk) -> Iterator[Page]:
    """Yield the pages of a column; raises `ValueError` for a damaged header."""
    at = chunk.start
    while at < chunk.stop:
        fields, length = _head(file, at)
        kind, expanded, stored = (fields.get(field) for field in (1, 2, 3))
        if not (isinstance(kind, int) and isinstance(expanded, int) and isinstance(stored, int)):
            raise ValueError(f"a page without a size at byte {at}")
        if min(expanded, stored) < 0:
            raise ValueError(f"a page of a negative size at byte {at}")
        yield Page(kind, expanded)
        at += length + stored


def _head(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the page header at a byte, and its length."""
    for size in HEAD_BYTES:
        file.seek(at)
        reader = _Reader(file.read(size))
        try:
            return reader.struct(), reader.at
        except IndexError:
            continue
    raise ValueError(f"no head of a page at byte {at}")


class _Reader:
    """A reader of Thrift's compact protocol; raises `IndexError` at the end of the bytes."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the integers, lists and structs of a struct by field; texts are skipped."""
        fields: dict[int, Any] = {}
        field = 0
        while head := self.byte():
            field = field + (head >> 4) if head >> 4 else self.integer()
            value = self.value(head & 15, depth)
            if value is not None:
                fields[field] = value
        return fields

    def value(self, kind: int, depth: int, listed: bool = False) -> Any:
        """Return a value, or None if it is skipped."""
        if depth > NESTING:
            raise ValueError("its metadata are nested too deeply")
        if kind in _INTEGERS:
            return self.integer()
        if kind == _BINARY:
            self.skip(self.natural())
        elif kind == _STRUCT:
            return self.struct(depth + 1)
        elif kind in _LISTS:
            head = self.byte()
            count = self.natural() if head >> 4 == 15 else head >> 4
            return [self.value(head & 15, depth + 1, listed=True) for _ in range(count)]
        elif kind == _MAP:
            count = self.natural()
            kinds = self.byte() if count else 0
            for _ in range(count):
                self.value(kinds >> 4, depth + 1, listed=True)
                self.value(kinds & 15, depth + 1, listed=True)
        elif kind in (_BYTE, _DOUBLE) or (kind in _BOOLEANS and listed):
            self.skip(8 if kind == _DOUBLE else 1)
        elif kind not in _BOOLEANS:
            raise ValueError(f"a value of the unknown kind {kind} in its metadata")
        return None

    def skip(self, count: int) -> None:
        """Skip bytes."""
        self.at += count
        if self.at > len(self.data):
            raise IndexError

    def byte(self) -> int:
        """Return the next byte."""
        self.skip(1)
        return self.data[self.at - 1]

    def natural(self) -> int:
        """Return the next non-negative integer, seven bits per byte, of at most 64 bits."""
        number = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise ValueError("an integer of more than 64 bits in its metadata")

    def integer(self) -> int:
        """Return the next integer; its sign is the last bit."""
        number = self.natural()
        return (number >> 1) ^ -(number & 1)


def read_parquet(path: Path | Remote, header: object = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file; raises `InputError` if it is damaged or expands beyond the limit."""
    import pyarrow
    from pyarrow import parquet

    try:
        with _with_parts(path) as heads, _with_parts(path) as binary:
            limit, total = max(EXPANDED, EXPANSION * heads.seek(0, io.SEEK_END)), 0
            repeated = _repeated(parquet.read_metadata(binary).schema)
            file = parquet.ParquetFile(binary, read_dictionary=repeated)
            for number, group in enumerate(chunks(heads)):
                rows = _checked(path, heads, group, file.schema, limit)
                for batch in file.iter_batches(rows, [number]):
                    size = ROW * batch.num_rows + sum(map(_bytes, batch.columns))
                    total += size
                    if total > limit:
                        raise too_large(path)
                    yield from _rows(batch, size)
    except (pyarrow.ArrowException, OSError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a Parquet file, or a damaged one ({reason_of(error)})") from error


def _with_parts(path: Path | Remote) -> BinaryIO:
    """Open a file with random access; a remote file that is sent only as a whole is read into memory."""
    file = path.open("rb")
    if file.seekable():
        return file
    with file:
        content = file.read(EXPANDED + 1)
    if len(content) > EXPANDED:
        raise InputError(f"{path}: the server does not send parts of files; fetch it, and name the file here")
    return io.BytesIO(content)


def _repeated(schema: Any) -> list[str]:
    """Return the columns of lists of texts, which are read as dictionary-encoded numbers."""
    columns = (schema.column(number) for number in range(len(schema)))
    texts = "UTF8", "NONE", "ENUM", "JSON", "BSON"
    return [
        column.path
        for column in columns
        if (column.max_repetition_level and column.physical_type == "BYTE_ARRAY")
        and column.converted_type in texts
    ]


def _checked(path: Path | Remote, file: Any, group: list[Chunk], schema: Any, limit: int) -> int:
    """Return the number of rows of a group that can be read at once.

    Raises `InputError` if the group is larger than `limit`. Page headers are read of local files only: for
    remote files this would fetch the file twice, so the sizes in its metadata are trusted.
    """
    size, largest = 0, 1
    for number, column in enumerate(group):
        size += column.expanded
        if schema.column(number).max_repetition_level:
            size += VALUE * column.values
        if not isinstance(path, Path):
            largest = max(largest, column.expanded)
            continue
        shared = DELTA_BYTE_ARRAY in column.encodings  # values share prefixes with their predecessor
        expanded = 0
        for page in pages(file, column):
            expanded += page.expanded
            if shared or page.kind == DICTIONARY:
                largest = max(largest, page.expanded)
        size += max(0, expanded - column.expanded)
    if size > limit:
        raise too_large(path)
    return max(1, min(ROWS, BATCH // largest))


def _bytes(array: Any) -> int:
    from pyarrow import types
    from pyarrow.compute import call_function

    kind = array.type
    if types.is_dictionary(kind) and not types.is_primitive(kind.value_type):
        lengths = call_function("binary_length", [array.dictionary])
        return VALUE * len(array) + int(call_function("sum", [lengths.take(array.indices)]).as_py() or 0)
    if types.is_struct(kind):
        return sum(map(_bytes, array.flatten()))
    if types.is_map(kind):
        return _bytes(array.keys) + _bytes(array.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return VALUE * len(array) + _bytes(array.flatten())
    return array.nbytes


def _rows(batch: Any, size: int) -> Iterator[Row]:
    """Yield the rows of a batch, converted one by one if they are large."""
    if size <= EXPANDED:
        yield from batch.to_pylist()
        return
    for number in range(batch.num_rows):
        yield from batch.slice(number, 1).to_pylist()
