"""GGUF files with one model each: the metadata, and the place of each tensor.

A file contains named values (a description of the model and its tokenizer), then the name, shape, number type
and offset of each tensor, then the tensors, little-endian (docs/gguf.md in github.com/ggml-org/ggml). Only
the part before the tensors is read here; every length in it is checked against the rest of the file before it
is used.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyformer.core.errors import InputError, quote
from polyformer.core.files import open_file, reading

SUFFIX = ".gguf"
WEIGHTS = "*.safetensors", "*.bin"
"""A folder with files of these names is not searched for GGUF files."""

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of values that are a single number, with their `struct` codes."""

DIMENSIONS = 4
"""The most dimensions of a tensor."""


class TensorPlace(NamedTuple):
    """shape: as in torch, rows first. kind: the code of the number type. offset: in the file, in bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Gguf:
    """The part before the tensors of the file `path`, which has `size` bytes."""

    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]

    @property
    def architecture(self) -> str:
        """The file's name of the model architecture."""
        return self.value("general.architecture", str)

    def value(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a value of type `kind`; `InputError` for another type, or no value and no `default`."""
        value = self.metadata.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and kind is float:
            return float(value)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong or (kind is float and not math.isfinite(value)):
            raise InputError(
                f"{self.path}: {name} is {quote(value)}, expected {kind.__name__}; get another copy of it"
            )
        return value


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file `path`, or the GGUF file in the folder `path`; None if there is none.

    A folder with weights in another format does not count. Raises `InputError` for several files in a folder.
    """
    path = Path(path)
    if path.is_file():
        return path if path.suffix.lower() == SUFFIX else None
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if not files or any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise InputError(f"{path}: it has {len(files)} GGUF files ({names}); name the one to read")
    return files[0]


def read_gguf(path: Path) -> Gguf:
    """Return the part before a file's tensors; `InputError` if it is damaged or of another version."""
    with reading(path), open_file(path) as file:
        size = path.stat().st_size
        head = file.read(24)
        if head[:4] != MAGIC:
            raise InputError(f"{path}: not a GGUF file: it does not begin with 'GGUF'")
        if len(head) < 24:
            raise _truncated(path)
        (version,) = struct.unpack_from("<I", head, 4)
        if version not in VERSIONS:
            way = "convert the model again by a current llama.cpp, little-endian"
            raise InputError(f"{path}: GGUF version {version}, and only 2 and 3 are supported; {way}")
        tensors, values = struct.unpack_from("<QQ", head, 8)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(path, content, 24)
            metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in cursor.times(values)}
            listed = {cursor.string(): cursor.tensor() for _ in cursor.times(tensors)}
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1:
        raise InputError(f"{path}: general.alignment is {quote(align)}, expected an integer from 1")
    start = -(-cursor.at // align) * align
    places = {name: place._replace(offset=start + place.offset) for name, place in listed.items()}
    return Gguf(path, size, metadata, places)


@dataclass
class _Cursor:
    """A reader that starts at `at`."""

    path: Path
    content: mmap.mmap
    at: int

    def times(self, count: int) -> range:
        """Return a range of `count` steps if the rest of the file has at least a byte for each."""
        if count > len(self.content) - self.at:
            raise _truncated(self.path)
        return range(count)

    def bytes(self, count: int) -> bytes:
        """Return the next bytes."""
        self.times(count)
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, code: str) -> Any:
        """Return the next number with this `struct` code."""
        return struct.unpack("<" + code, self.bytes(struct.calcsize(code)))[0]

    def string(self) -> str:
        """Return the next text."""
        try:
            return self.bytes(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}: damaged: a name that is no text ({error}); get another copy of it"
            ) from error

    def value(self, kind: int, nested: bool = False) -> Any:
        """Return the next value: a number, a text or, unless it is nested, a list."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY and not nested:
            kind, count = self.number("I"), self.number("Q")
            if kind not in SCALARS:
                return [self.value(kind, nested=True) for _ in self.times(count)]
            code = f"{count}{SCALARS[kind]}"
            self.times(count)
            return list(struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code))))
        if kind not in SCALARS:
            raise InputError(
                f"{self.path}: damaged: a value of the unknown kind {kind}; get another copy of it"
            )
        return self.number(SCALARS[kind])

    def tensor(self) -> TensorPlace:
        """Return the shape, number type and offset of the next tensor, counted from the first tensor."""
        dimensions = self.number("I")
        if dimensions > DIMENSIONS:
            raise InputError(
                f"{self.path}: damaged: a tensor of {dimensions} dimensions; get another copy of it"
            )
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return TensorPlace(shape[::-1], self.number("I"), self.number("Q"))


def _truncated(path: Path) -> InputError:
    return InputError(f"{path}: truncated: the file is shorter than its header states; get another copy")
