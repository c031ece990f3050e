"""Opening of plain, gzipped or zstd-compressed files for reading; all problems raise `InputError`."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from polyformer.core.errors import InputError
from polyformer.core.files import open_file
from polyformer.core.limits import EXPANDED, EXPANSION, LINE
from polyformer.data.remote import Remote

SUFFIXES = (".gz", ".zst")
"""Suffixes of compressed files."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


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
def opened_bytes(path: Path | Remote) -> Iterator[BinaryIO]:
    """Open the bytes of `path`, decompressed if they are gzipped or zstd.

    Raises `InputError` if it cannot be read, or if it expands beyond the limit.
    """
    try:
        with path.open() if isinstance(path, Remote) else open_file(path) as raw:
            head = raw.peek(4)[:4]
            kind = "zstd" if head == _ZSTD else "gzip" if head[:2] == _GZIP else None
            yield cast(BinaryIO, io.BufferedReader(_Limited(raw, path, kind), 2**20)) if kind else raw
    except EOFError as error:
        raise InputError(f"{path}: truncated: the gzip file ends too early; fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextmanager
def opened(path: Path | Remote) -> Iterator[TextIO]:
    """Open the text of `path`; see `opened_bytes`."""
    try:
        # Only \n ends a line: texts contain Unicode's other separators, and parallel files must stay aligned.
        with (
            opened_bytes(path) as binary,
            io.TextIOWrapper(binary, encoding="utf-8-sig", newline="\n") as text,
        ):
            yield text
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text ({error.reason}); convert it, for example with iconv"
        ) from error


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
