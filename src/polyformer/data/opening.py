"""Files opened to be read, plain, gzipped or zstd, with one kind of error for whatever is wrong with them."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from polyformer.core.errors import InputError
from polyformer.data.remote import Remote

# Text shrinks to a fifth or a tenth; what is 200 times its file, and large, was made to fill a memory.
EXPANSION, EXPANDED = 200, 2**26

LINE = 2**26
"""Characters of the longest line that is read."""


SUFFIXES = (".gz", ".zst")
"""What the names of compressed files end with."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class _Unzipped(gzip.GzipFile):
    """A gzip file that stops where far more comes out of it than texts and images have."""

    def __init__(self, raw: BinaryIO, path: Path | Remote):
        super().__init__(fileobj=raw)
        self._limit, self._path = _limit(raw), path

    def read(self, size: int | None = -1) -> bytes:
        """`size` bytes, decompressed."""
        whole = size is None or size < 0
        return self._checked(super().read(self._limit + 1 if whole else size))

    def read1(self, size: int = -1) -> bytes:
        """At most `size` bytes, by one read of the file."""
        return self._checked(super().read1(size))

    def _checked(self, data: bytes) -> bytes:
        if self.tell() > self._limit:
            raise _too_large(self._path)
        return data


class _Zstd(io.RawIOBase):
    """The same of a zstd file, by Arrow, which `datasets` brings: Python before 3.14 has no reader for it."""

    def __init__(self, raw: BinaryIO, path: Path | Remote):
        import pyarrow

        self._limit, self._path, self._read = _limit(raw), path, 0
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with what is decompressed next; how many bytes there were."""
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise InputError(f"{self._path}: a damaged zstd file ({error}); fetch it again") from error
        self._read += len(data)
        if self._read > self._limit:
            raise _too_large(self._path)
        buffer[: len(data)] = data
        return len(data)


def _limit(raw: BinaryIO) -> int:
    """How many bytes may come out of the compressed file `raw`, which is left at its beginning."""
    size = raw.seek(0, io.SEEK_END)
    raw.seek(0)
    return max(EXPANDED, EXPANSION * size)


def _too_large(path: Path | Remote) -> InputError:
    return InputError(
        f"{path}: more than {EXPANSION} times as large as its compressed file: refused; "
        "decompress it yourself if you trust it"
    )


def plain_name(name: str) -> str:
    """The name of a file without the suffix of its compression."""
    return name.removesuffix(next((suffix for suffix in SUFFIXES if name.endswith(suffix)), ""))


@contextmanager
def opened_bytes(path: Path | Remote) -> Iterator[BinaryIO]:
    """The bytes of `path`, decompressed if they are gzipped or zstd; an `InputError` for what cannot be read,
    and for what grows beyond all proportion when it is decompressed."""
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
            raw.seek(0)
            if head == _ZSTD:
                yield cast(BinaryIO, io.BufferedReader(_Zstd(raw, path), 2**20))
            else:
                yield cast(BinaryIO, _Unzipped(raw, path)) if head[:2] == _GZIP else raw
    except EOFError as error:
        raise InputError(f"{path}: truncated: the gzip file ends too early; fetch it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: a damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextmanager
def opened(path: Path | Remote) -> Iterator[TextIO]:
    """The text of `path`, likewise."""
    try:
        # Only \n ends a line: Unicode's other separators stand inside texts, and parallel files must not
        # drift.
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
    """The lines of an opened file, each with its end; an `InputError` for one that no text has."""
    number = 0
    while line := file.readline(LINE + 1):
        number += 1
        if len(line) > LINE:
            raise InputError(f"{path}, line {number}: longer than {LINE} characters; split it into lines")
        yield line
