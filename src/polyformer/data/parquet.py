"""Rows of a Parquet file, with a limit on its expanded size.

A few bytes can expand to gigabytes: pages are compressed, repeated numbers are counts, and a dictionary
stores a long value once that occurs a million times. So the sizes stated in the file are checked before a row
group is read, no batch can exceed `BATCH` bytes, and the expanded bytes are counted.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, reason_of
from polyformer.core.limits import EXPANDED, EXPANSION
from polyformer.data.compressed_files import too_large
from polyformer.data.parquet_pages import DELTA_BYTE_ARRAY, Chunk, chunks, pages
from polyformer.data.remote import Remote
from polyformer.data.tables import Row

ROWS, BATCH = 1024, 2**30
"""The most rows per batch, and the most bytes of its values."""

ROW, VALUE = 64, 8
"""Bytes that are counted for every row, and for every value of a list."""

DICTIONARY = 2


def read_parquet(path: Path | Remote, header: object = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file; raises `InputError` if it is damaged or expands beyond the limit."""
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as heads, path.open("rb") as binary:
            limit, total = max(EXPANDED, EXPANSION * heads.seek(0, io.SEEK_END)), 0
            repeated = _repeated(parquet.read_metadata(binary).schema)
            file = parquet.ParquetFile(binary, read_dictionary=repeated)
            for number, group in enumerate(chunks(heads)):
                rows = _checked(path, heads, group, file.schema, limit)
                for batch in file.iter_batches(rows, [number]):
                    size = _expanded(batch)
                    total += size
                    if total > limit:
                        raise too_large(path)
                    yield from _rows(batch, size)
    except (pyarrow.ArrowException, OSError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a Parquet file, or a damaged one ({reason_of(error)})") from error


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


def _expanded(batch: Any) -> int:
    """Return the bytes of all values of a batch, with repetitions."""
    return ROW * batch.num_rows + sum(map(_bytes, batch.columns))


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
