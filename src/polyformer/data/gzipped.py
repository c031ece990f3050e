"""Files opened to be read, plain or gzipped, with one kind of error for whatever is wrong with them."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from polyformer.core.errors import InputError

# Text shrinks to a fifth or a tenth; what is 200 times its file, and large, was made to fill a memory.
EXPANSION, EXPANDED = 200, 2**26

LINE = 2**26
"""Characters of the longest line that is read."""


class _Unzipped(gzip.GzipFile):
    """A gzip file that stops where far more comes out of it than texts and images have."""

    def __init__(self, raw: BinaryIO, path: Path):
        super().__init__(fileobj=raw)
        self._limit = max(EXPANDED, EXPANSION * os.fstat(raw.fileno()).st_size)
        self._path = path

    def read(self, size: int | None = -1) -> bytes:
        """`size` bytes, decompressed."""
        whole = size is None or size < 0
        return self._checked(super().read(self._limit + 1 if whole else size))

    def read1(self, size: int = -1) -> bytes:
        """At most `size` bytes, by one read of the file."""
        return self._checked(super().read1(size))

    def _checked(self, data: bytes) -> bytes:
        if self.tell() > self._limit:
            raise InputError(
                f"{self._path}: more than {EXPANSION} times as large as its gzip file says: refused; "
                "decompress it yourself if you trust it"
            )
        return data


@contextmanager
def opened_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of `path`, decompressed if it is gzipped; an `InputError` for what cannot be read, and for
    what grows beyond all proportion when it is decompressed."""
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            yield cast(BinaryIO, _Unzipped(raw, path)) if gzipped else raw
    except EOFError as error:
        raise InputError(f"{path}: truncated: the gzip file ends too early; fetch it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: a damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
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


def lines_of(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of an opened file, each with its end; an `InputError` for one that no text has."""
    number = 0
    while line := file.readline(LINE + 1):
        number += 1
        if len(line) > LINE:
            raise InputError(f"{path}, line {number}: longer than {LINE} characters; split it into lines")
        yield line
