"""Parquet: rows are those of pyarrow for every encoding, and what expands beyond the limit is refused."""

import contextlib
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from polyformer.core.errors import InputError
from polyformer.data.formats.readers import read_parquet

N = 3000
COLUMNS: dict[str, list[Any]] = {
    "text": [f"t{i} " * 10 for i in range(N)],
    "label": [i % 3 for i in range(N)],
    "tokens": [[f"w{i % 7}", "b"] for i in range(N)],
    "image": [{"bytes": b"xyz", "path": None}] * N,
    "nested": [[{"x": ["p", "q"]}], None] * (N // 2),
    "numbers": [[1.0, 2.0]] * N,
    "nothing": [None] * N,
    "when": [datetime.datetime(2020, 1, 1)] * N,
}
TABLE = pa.table({**COLUMNS, "pairs": pa.array([[("a", 1)]] * N, pa.map_(pa.string(), pa.int64()))})
REFUSED = "more than 200 times as large as its compressed file"


def repeated(value: Any, count: int) -> pa.Array:
    """`count` times the same value, which a file holds once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"compression": "snappy", "data_page_version": "2.0", "write_page_index": True},
        {"compression": "gzip", "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        {"compression": "none", "row_group_size": 700, "write_page_checksum": True},
        {"store_schema": False, "write_statistics": False},
    ],
)
def test_rows_are_those_of_pyarrow(options: dict[str, Any], tmp_path: Path):
    file = tmp_path / "a.parquet"
    parquet.write_table(TABLE, file, **options)
    assert list(read_parquet(file)) == parquet.read_table(file).to_pylist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: repeated("x" * 100_000, 10_000),
        lambda: pa.ListArray.from_arrays([0, 20_000], repeated("x" * 1_000_000, 20_000)),
        lambda: pa.repeat(b"a" * 10_000_000, 10),
        lambda: pa.repeat("a", 5_000_000),
        lambda: pa.nulls(5_000_000, pa.string()),
        lambda: pa.ListArray.from_arrays([0, 50_000_000], pa.repeat(7, 50_000_000)),
    ],
    ids=["values", "lists", "pages", "rows", "nulls", "numbers"],
)
def test_a_file_that_expands_to_gigabytes_is_refused(make: Callable[[], pa.Array], tmp_path: Path):
    """They stand for 80 MB to 20 GB, in 60 KB at most."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": make()}), file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 60_000
    with pytest.raises(InputError, match=REFUSED):
        for _ in read_parquet(file):
            pass


def test_a_value_that_repeats_the_last_one(tmp_path: Path):
    """Each row is 100 KB, of which the file holds what differs."""
    file = tmp_path / "a.parquet"
    text = pa.array(["x" * 100_000 + str(i) for i in range(3000)])
    encoding: Any = {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "use_dictionary": False}
    parquet.write_table(pa.table({"text": text}), file, compression="zstd", **encoding)
    with pytest.raises(InputError, match=REFUSED):
        list(read_parquet(file))


def test_damage(tmp_path: Path):
    file = tmp_path / "a.parquet"
    parquet.write_table(TABLE, file)
    whole = file.read_bytes()
    for content in (b"", whole[:100], whole[:4] + bytes(200) + whole[204:]):
        file.write_bytes(content)
        with pytest.raises(InputError, match="not a Parquet file, or a damaged one"):
            list(read_parquet(file))


def test_metadata_that_contradict_one_another(tmp_path: Path):
    """pyarrow ends the process where it is asked for such a column's sizes: histograms of another length."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a b", "c"], "tokens": [["x"], ["y", "z"]]}), file)
    whole = file.read_bytes()
    size = int.from_bytes(whole[-8:-4], "little")
    for place in range(len(whole) - 8 - size, len(whole) - 8):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with contextlib.suppress(InputError):
            list(read_parquet(file))
