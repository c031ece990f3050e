"""Rows of a Parquet file, with a limit on its expanded size.

A few bytes can expand to gigabytes: pages are compressed, repeated numbers are counts, and a dictionary
stores a long value once that occurs a million times. So the size that the file states for a row group is
checked before the group is read, rows are read in batches, columns of lists of texts stay dictionaries until
their size is known, and the expanded bytes are counted before values are made of them.

Only the sizes of whole row groups are asked for. pyarrow ends the process where it is asked for a column
whose metadata contradict one another, and raises an error where it reads it.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from polyformer.core.errors import InputError, reason_of
from polyformer.core.ranges import EXPANDED, EXPANSION
from polyformer.data.formats.tables import Row
from polyformer.data.sources.files import Remote, too_large

ROWS, BATCH = 256, 2**31
"""The most rows per batch, and the most bytes of a batch in which each row is as large as its whole group."""

ROW, VALUE = 64, 8
"""Bytes that are counted for every row, and for every value of a list."""


def read_parquet(path: Path | Remote, header: object = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file; raises `InputError` if it is damaged or expands beyond the limit."""
    import pyarrow
    from pyarrow import parquet

    try:
        with _with_parts(path) as binary:
            limit, total = max(EXPANDED, EXPANSION * binary.seek(0, io.SEEK_END)), 0
            metadata = parquet.read_metadata(binary)
            file = parquet.ParquetFile(binary, read_dictionary=_repeated(metadata.schema), metadata=metadata)
            for number in range(metadata.num_row_groups):
                stated = metadata.row_group(number).total_byte_size
                if stated > limit:
                    raise too_large(path)
                for batch in file.iter_batches(max(1, min(ROWS, BATCH // max(1, stated))), [number]):
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
