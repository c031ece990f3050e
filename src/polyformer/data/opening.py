"""Files opened to be read, plain or gzipped, with one kind of error for whatever is wrong with them."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from polyformer.core.errors import InputError


@contextmanager
def opened_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of `path`, decompressed if it is gzipped; an `InputError` for what cannot be read."""
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if gzipped else raw
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
