"""Files by their names: local or remote, plain or compressed.

Remote files have addresses: s3://bucket/part-*.jsonl.zst, hf://datasets/owner/name/*.parquet. fsspec opens
them, as in `datasets`: it reads parts of a file on demand, and supports some thirty protocols (s3 by the
extra `remote`; hf by huggingface_hub; http, memory and file without extras).

Files are plain, gzipped or zstd-compressed, and all problems raise `InputError`. Text is UTF-8, or UTF-16 if
it begins with a byte order mark, as Excel and Windows write "Unicode text".
"""

import codecs
import gzip
import io
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from polyformer.core.errors import InputError, reason_of
from polyformer.core.files import open_file
from polyformer.core.ranges import EXPANDED, EXPANSION, LINE

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://.")

EXTRAS = {"s3": "remote", "s3a": "remote"}
"""By protocol: the extra of this package that installs its reader."""

HTTP = "http", "https"
PATIENCE, SLOWEST = 60.0, 2**10
"""Seconds until a server must answer, and the bytes per second that it must then send on average."""

NO_PARTS = 416
"""The status of a response to a request of a part that the file does not have."""

PART = 2**20
"""Bytes of a file that are requested at once, and that are buffered."""


@dataclass(frozen=True, eq=False)
class Remote:
    """A file on fsspec's file system `system`; it is opened like a `Path`."""

    system: Any
    path: str
    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """Return the last part of the address."""
        return self.path.rstrip("/").rpartition("/")[2]

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file; with random access unless it is on a web server that does not send parts of files.

        Only "rb". All errors, also those of reading, are `OSError`.
        """
        source = _quietly(
            lambda: _open_http(self) if _is_http(self.system) else self.system.open(self.path, mode)
        )
        return io.BufferedReader(_Source(source), PART)

    @property
    def bytes(self) -> int:
        """Return its size."""
        return int(self.system.size(self.path) or 0)

    @property
    def version(self) -> str:
        """Return the file system's identifier of the content, which changes with the content."""
        return str(self.system.checksum(self.path))


def is_remote(path: str) -> bool:
    """Return whether `path` is an address."""
    return _ADDRESS.match(path) is not None


def remote_files(address: str) -> list[Remote]:
    """Return the files that match an address or pattern, in the order of their names; maybe none.

    Raises `InputError` for an unknown protocol, a missing package, or an unreachable system.
    """
    import fsspec

    protocol = address.partition("://")[0]
    try:
        system, root = fsspec.core.url_to_fs(address, **(_http_options() if protocol in HTTP else {}))
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        way = f"pip install 'polyformer[{extra}]'" if extra else f"install it ({error})"
        raise InputError(
            f"{address}: reading {protocol}:// needs a package that is not here: {way}"
        ) from error
    except Exception as error:  # every file system raises different exceptions
        raise InputError(f"{address}: cannot be opened ({reason_of(error)})") from error
    try:
        pattern = any(sign in root for sign in "*?[")
        paths = sorted(system.glob(root)) if pattern else [root] if system.exists(root) else []
        return [Remote(system, path, system.unstrip_protocol(path)) for path in paths if system.isfile(path)]
    except Exception as error:
        raise InputError(f"{address}: cannot be reached ({reason_of(error)})") from error


class _Source(io.RawIOBase):
    """A file of fsspec or a web server; all errors are `OSError`, also that the server is too slow."""

    def __init__(self, source: Any):
        self.source, self.size, self.position = source, getattr(source, "size", None), 0
        self.received, self.waited, self.ended = 0, 0.0, False

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return whether parts of the file can be read."""
        return not isinstance(self.source, _Download)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Continue at another byte."""
        self.position, self.ended = int(_quietly(lambda: self.source.seek(offset, whence))), False
        return self.position

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, except at the end of the file; return the number of bytes."""
        filled = 0
        while filled < len(buffer) and not self.ended:
            start = time.monotonic()
            data = _quietly(partial(self.source.read, len(buffer) - filled))
            self.ended = not data
            buffer[filled : filled + len(data)] = data
            filled += len(data)
            self._check_speed(len(data), time.monotonic() - start)
        self.position += filled
        if not filled and len(buffer) and self.size is not None and self.position < self.size:
            raise OSError(f"it ends after {self.position:,} of {self.size:,} bytes")
        return filled

    def _check_speed(self, count: int, seconds: float) -> None:
        self.received, self.waited = self.received + count, self.waited + seconds
        if self.waited > PATIENCE and self.received < SLOWEST * self.waited:
            raise OSError(f"the server sends fewer than {SLOWEST:,} bytes per second")

    def close(self) -> None:
        """Close the source."""
        if not self.closed:
            super().close()
            self.source.close()


def _quietly(call: Callable[[], Any]) -> Any:
    """Return the result of a call of fsspec; any error in it becomes an `OSError` with a reason."""
    try:
        return call()
    except TimeoutError as error:
        raise OSError(f"the server did not answer for {PATIENCE:g} seconds") from error
    except Exception as error:  # every file system raises different exceptions
        if isinstance(error, OSError) and error.strerror:
            raise
        raise OSError(reason_of(error)) from error


def _is_http(system: Any) -> bool:
    return bool({*HTTP} & {*([system.protocol] if isinstance(system.protocol, str) else system.protocol)})


def _http_options() -> dict[str, Any]:
    """Return options of fsspec: a request ends in time, and the server is not to compress files."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    return {"client_kwargs": {"timeout": timeout, "headers": {"Accept-Encoding": "identity"}}}


def _open_http(file: Remote) -> Any:
    """Open a file by parts, which allows pauses of the reader, if the server sends parts; else as a whole."""
    download = _Download(file, {"Range": "bytes=0-0"})
    total = re.fullmatch(r"bytes 0-0/(\d+)", download.headers.get("Content-Range", ""))
    encoded = download.headers.get("Content-Encoding", "identity") != "identity"
    download.close()
    if download.status != 206 or total is None or encoded:
        return _Download(file, {})
    return file.system.open(file.path, "rb", size=int(total[1]), block_size=PART)


class _Download:
    """The body of a response, read once in its order."""

    def __init__(self, file: Remote, headers: dict[str, str]):
        import aiohttp

        self.loop = file.system.loop
        url, timeout = file.system.encode_url(file.path), aiohttp.ClientTimeout(total=None)

        async def get() -> Any:
            session = await file.system.set_session()
            return await session.get(url, headers=headers, timeout=timeout)

        self.response = self._waited(get)
        self.status, self.headers = self.response.status, self.response.headers
        if self.status != NO_PARTS:
            self.response.raise_for_status()

    def _waited(self, call: Callable[..., Any], *arguments: object) -> Any:
        from fsspec.asyn import sync

        return sync(self.loop, call, *arguments, timeout=PATIENCE)

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count` of them; b"" at the end."""
        return bytes(self._waited(self.response.content.read, count))

    def close(self) -> None:
        """Close the connection."""
        self.loop.call_soon_threadsafe(self.response.close)


SUFFIXES = (".gz", ".zst")
"""Suffixes of compressed files."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


_UTF_32 = codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE
_UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


class DecodedText(io.TextIOWrapper):
    """The text of binary input, decoded by its byte order mark, or as UTF-8.

    name: for errors. Raises `InputError` for bytes that are not text in this encoding. Only \\n ends a line:
    texts contain Unicode's other separators, and parallel files must stay aligned.
    """

    def __init__(self, binary: io.BufferedReader, name: object):
        self.source, self.binary = name, binary
        head = binary.peek(4)
        _refuse_unmarked(head, name)
        marked = head.startswith(_UTF_16) and not head.startswith(_UTF_32)
        super().__init__(binary, encoding="utf-16" if marked else "utf-8-sig", newline="\n")

    def read(self, size: int | None = -1, /) -> str:
        """Return at most `size` characters, or all."""
        try:
            return super().read(size)
        except UnicodeDecodeError as error:
            raise self._undecodable(error) from error

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        """Return the next line, at most `size` characters of it."""
        try:
            return super().readline(size)
        except UnicodeDecodeError as error:
            raise self._undecodable(error) from error

    def _undecodable(self, error: UnicodeDecodeError) -> InputError:
        # The decoder has got all bytes up to the position of the input, and its error holds the last of them.
        offset = self.binary.tell() - len(error.object) + error.start
        if self.encoding == "utf-16":
            return InputError(
                f"{self.source}: not UTF-16 text, which its byte order mark announces ({error.reason} at "
                f"byte {offset:,}); save it as UTF-8"
            )
        return InputError(
            f"{self.source}: not UTF-8 text ({error.reason} 0x{error.object[error.start]:02x} at byte "
            f"{offset:,}); save it as UTF-8, or convert it, for example with iconv -f LATIN1 -t UTF-8"
        )


def _refuse_unmarked(head: bytes, name: object) -> None:
    """Raise `InputError` if the first bytes are UTF-16 without a byte order mark.

    Half of the bytes of Latin letters are then zero: those at odd places, or those at even places.
    """
    zeros = head[0::2].count(0), head[1::2].count(0)
    one_side = min(zeros) * 4 <= max(zeros) and max(zeros) * 8 >= len(head)
    if not any(zeros) or not one_side or head.startswith(_UTF_16):
        return
    kind = "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE"
    raise InputError(
        f"{name}: not UTF-8 text (zero at byte {head.index(0):,}, as in UTF-16 without a byte order mark); "
        f"save it as UTF-8, or convert it with iconv -f {kind} -t UTF-8"
    )


class _Limited(io.RawIOBase):
    """Decompressed bytes, refused far beyond the ratio of texts and images."""

    def __init__(self, raw: io.BufferedReader, path: Path | Remote, kind: str):
        self.path, self.kind, self.raw, self.expanded, self.size = path, kind, raw, 0, 0
        if raw.seekable():
            self.size = raw.seek(0, io.SEEK_END)
            raw.seek(0)
        self.stream: Any
        if kind == "zstd":  # by Arrow, a dependency of `datasets`: Python before 3.14 cannot read zstd
            import pyarrow

            self.stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), kind)
        else:
            self.stream = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of decompressed bytes that were read."""
        return self.expanded

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with the next decompressed bytes; return their number."""
        try:
            data = self.stream.read(len(buffer))
        except (OSError, zlib.error) as error:
            raise InputError(f"{self.path}: a damaged {self.kind} file ({error}); fetch it again") from error
        self.expanded += len(data)
        if self.expanded > max(EXPANDED, EXPANSION * (self.size or self.raw.tell())):
            raise too_large(self.path)
        buffer[: len(data)] = data
        return len(data)


def too_large(path: Path | Remote) -> InputError:
    """Return the error for a file that expands beyond the limit."""
    return InputError(
        f"{path}: more than {EXPANSION} times as large as its compressed file: refused; "
        "decompress it yourself if you trust it"
    )


def plain_name(name: str) -> str:
    """Return a file's name without the suffix of its compression."""
    return name.removesuffix(next((suffix for suffix in SUFFIXES if name.endswith(suffix)), ""))


@contextmanager
def opened_bytes(path: Path | Remote) -> Iterator[io.BufferedReader]:
    """Open the bytes of `path`, decompressed if they are gzipped or zstd.

    Raises `InputError` if it cannot be read, or if it expands beyond the limit.
    """
    try:
        with path.open() if isinstance(path, Remote) else open_file(path) as raw:
            head = raw.peek(4)[:4]
            kind = "zstd" if head == _ZSTD else "gzip" if head[:2] == _GZIP else None
            yield io.BufferedReader(_Limited(raw, path, kind), 2**20) if kind else raw
    except EOFError as error:
        raise InputError(f"{path}: truncated: the gzip file ends too early; fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextmanager
def opened(path: Path | Remote) -> Iterator[TextIO]:
    """Open the text of `path`; see `opened_bytes` and `DecodedText`."""
    with opened_bytes(path) as binary, DecodedText(binary, path) as text:
        yield text


def lines_of(file: TextIO, path: Path | Remote) -> Iterator[str]:
    """Yield the lines of an opened file, each with its end; raises `InputError` for an overlong line."""
    number = 0
    while line := file.readline(LINE + 1):
        number += 1
        if len(line) > LINE:
            raise InputError(f"{path}, line {number}: longer than {LINE} characters; split it into lines")
        yield line


def whole_text(path: Path | Remote) -> str:
    """Return the text of a file without line ends at its end; raise `InputError` for a blank file."""
    with opened(path) as file:
        text = "".join(lines_of(file, path))
    if not text.strip():
        raise InputError(f"{path}: expected a text, got only white space")
    return text.rstrip("\r\n")
