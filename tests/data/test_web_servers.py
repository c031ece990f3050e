"""Files on web servers of many kinds: the same rows as from the file here, or an error in words, in time."""

import gzip
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from polyformer.core.errors import InputError
from polyformer.data.sources import files as remote
from polyformer.data.sources.origins import open_source

ROWS = [{"text": f"dòng số {number} " + "of a long text " * 40} for number in range(5000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table() -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=1000)
    return sink.getvalue()


FILES = {"/a.jsonl": LINES, "/a.jsonl.gz": gzip.compress(LINES), "/a.parquet": table(), "/empty.jsonl": b""}


class Server(BaseHTTPRequestHandler):
    """Sends whole files, as most small servers do."""

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(FILES.get(self.path, b""))

    def answer(self, body: bytes) -> None:
        if self.path not in FILES:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(FILES[self.path])))
        self.end_headers()
        self.wfile.write(body)


class WithParts(Server):
    """Sends the part of a file that is requested."""

    def answer(self, body: bytes) -> None:
        part = self.headers.get("Range")
        if part is None or not body:
            super().answer(body)
            return
        first, last = map(int, part.removeprefix("bytes=").split("-"))
        last = min(last, len(body) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(body[first : last + 1])


class Compressed(Server):
    """Compresses everything, even for a client that does not want it."""

    def answer(self, body: bytes) -> None:
        packed = gzip.compress(FILES[self.path])
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed if self.command == "GET" else b"")


class Chunked(Server):
    """Does not know the size of its files."""

    protocol_version = "HTTP/1.1"

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(body), 2**16):
            piece = body[start : start + 2**16]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")


class Short(Server):
    """Announces more bytes than it sends."""

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(LINES) + 10**6))
        self.end_headers()
        self.wfile.write(body)


class ShortParts(WithParts):
    """Loses the last part of a file."""

    def answer(self, body: bytes) -> None:
        if self.headers.get("Range", "bytes=0-").startswith("bytes=0-"):
            super().answer(body)
        else:
            self.send_error(416)


class Failing(WithParts):
    """Fails after the first part."""

    def answer(self, body: bytes) -> None:
        if self.headers.get("Range", "bytes=0-").startswith("bytes=0-"):
            super().answer(body)
        else:
            self.send_error(503)


class Slow(Server):
    """Sends a few bytes per second."""

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        for byte in body[:100]:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.05)


class Silent(Server):
    """Never answers."""

    def answer(self, body: bytes) -> None:
        time.sleep(3)


@pytest.fixture
def served() -> Iterator[Callable[[type[Server]], str]]:
    """`served(kind)`: the address of a server."""
    servers = []

    def start(kind: type[Server]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients leave
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def rows(path: str) -> list[dict[str, Any]]:
    return list(open_source(path, "train"))


@pytest.mark.parametrize("kind", [Server, WithParts, Compressed, Chunked])
def test_all_servers_send_the_same_rows(served: Callable[[type[Server]], str], kind: type[Server]):
    assert len(LINES) > 2 * remote.PART
    address = served(kind)
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert rows(f"{address}/{name}") == ROWS, name
    assert rows(f"{address}/empty.jsonl") == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Short, "cannot be read"),
        (ShortParts, r"cannot be read \(it ends after "),
        (Failing, "cannot be read .*503"),
        (Slow, "cannot be read .*sends fewer than 1,024 bytes per second"),
        (Silent, "cannot be reached|did not answer"),
    ],
)
def test_a_failing_server_is_an_error_in_words_and_in_time(
    served: Callable[[type[Server]], str], kind: type[Server], message: str, monkeypatch: pytest.MonkeyPatch
):
    if kind in (Slow, Silent):
        monkeypatch.setattr(remote, "PATIENCE", 0.4)
    start = time.monotonic()
    with pytest.raises(InputError, match=f"^http://127.0.0.1:.*/a.jsonl: .*{message}"):
        rows(f"{served(kind)}/a.jsonl")
    assert time.monotonic() - start < 20


def test_a_missing_file(served: Callable[[type[Server]], str]):
    with pytest.raises(InputError, match=r"none.jsonl: no such file"):
        rows(f"{served(Server)}/none.jsonl")


def test_a_large_table_needs_a_server_of_parts(
    served: Callable[[type[Server]], str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("polyformer.data.formats.readers.EXPANDED", 1000)
    with pytest.raises(InputError, match=r"a.parquet: the server does not send parts of files; fetch it"):
        rows(f"{served(Server)}/a.parquet")


@pytest.mark.parametrize(
    "address",
    [
        "ftp://127.0.0.1:1/a.txt",
        "http://127.0.0.1:1/a.txt",
        "http://[::1/a.txt",
        "http:///a.txt",
        "reference://a.txt",
        "reference:///nowhere.json",
        "tar://a.txt::file:///nowhere.tar",
        "zip://a.txt::file:///nowhere.zip",
        "zip://a.txt",
        "simplecache://a.txt",
        "filecache::http://127.0.0.1:1/a.txt",
        "blockcache::nowhere",
        "ssh://127.0.0.1:1/a.txt",
        "smb://127.0.0.1:1/a/b.txt",
        "github://a:b@main/c.txt",
        "data://a",
        "dir://a.txt",
        "asynclocal:///nowhere.txt",
    ],
)
def test_addresses_that_lead_nowhere(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        rows(address)
