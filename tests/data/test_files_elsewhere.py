"""Files elsewhere and zstd-compressed ones: the same rows as from the plain file here."""

import json
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from polyformer.core.errors import InputError
from polyformer.data.formats.guess import guess
from polyformer.data.sources.files import EXPANDED
from polyformer.data.sources.origins import open_source
from polyformer.data.sources.splits import DataConfig, read
from polyformer.training.recipes.recipe import absolute

ROWS = [{"text": f"dòng số {number}\u2028 with an end"} for number in range(7)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    """`data` compressed."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def bucket():
    """A folder of fsspec's own file system in memory."""
    system = fsspec.filesystem("memory")
    table = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(ROWS), table)
    files = {"a-1.jsonl.zst": zstd(LINES), "a-2.jsonl": LINES, "b.parquet": table.getvalue().to_pybytes()}
    for name, content in files.items():
        system.pipe(f"/bucket/{name}", content)
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


def rows(path: str, format: str | None = None):
    return list(open_source(path, "train", format))


def test_files_elsewhere_are_read_as_files_here(bucket: str):
    assert rows(f"{bucket}/a-1.jsonl.zst") == ROWS
    assert rows(f"{bucket}/b.parquet") == ROWS
    assert rows(f"{bucket}/a-*") == ROWS + ROWS
    streamed = DataConfig(path=f"{bucket}/a-*", streaming=True)
    assert list(read(streamed, ("text",), streamed.path)) == ROWS + ROWS
    assert guess(f"{bucket}/b.parquet", {}).kind == "lm"
    assert absolute({"path": f"{bucket}/b.parquet"})["path"] == f"{bucket}/b.parquet"


def test_local_addresses(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    assert rows(f"file://{tmp_path}/*.jsonl") == ROWS


def test_an_address_without_a_file_or_protocol_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"^memory://bucket/none.txt: no such file$"):
        rows(f"{bucket}/none.txt")
    with pytest.raises(InputError, match=r"^nosuch://a/b.txt: .*nosuch"):
        rows("nosuch://a/b.txt")
    with pytest.raises(InputError, match=r"npz is read from files of this machine only"):
        rows(f"{bucket}/a-2.jsonl", "npz")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"^s3://bucket/a.txt: .* pip install 'polyformer\[remote\]'$"):
        rows("s3://bucket/a.txt")


def test_zstd_files(tmp_path: Path):
    file = tmp_path / "a.txt.zst"
    file.write_bytes(zstd(b"caf\xc3\xa9\n") + zstd("đi\n".encode()))  # frames one after another
    assert rows(str(file)) == [{"text": "café\nđi\n"}]
    whole = zstd(LINES * 50)
    file.write_bytes(whole[:-9])
    with pytest.raises(InputError, match=r"a.txt.zst: a damaged zstd file"):
        rows(str(file))
    file.write_bytes(zstd(bytes(EXPANDED + 1)))
    with pytest.raises(InputError, match="times as large as its compressed file"):
        rows(str(file), "lines")
