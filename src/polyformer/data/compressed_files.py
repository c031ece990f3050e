"""Opening of plain, gzipped or zstd-compressed files for reading; all problems raise `InputError`.

Text is UTF-8, or UTF-16 if it begins with a byte order mark, as Excel and Windows write "Unicode text".
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from polyformer.core.errors import InputError
from polyformer.core.files import open_file
from polyformer.core.limits import EXPANDED, EXPANSION, LINE
from polyformer.data.remote import Remote

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
