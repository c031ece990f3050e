"""Files that are complete or absent: written under another name, synced, renamed; errors name the file.

Weights are safetensors, everything else is JSON; nothing here ever reads a pickle, which can run code. A
safetensors file is written one tensor after another, so that only one needs to be in memory:

    8 bytes, the length of the header | JSON: type, shape and place of every tensor | their numbers

The whole header is known before any number. The bytes are the same as from the library's `save_file`, which
takes all tensors at once. https://huggingface.co/docs/safetensors, "Format".

Destinations named by a user are written by `write_output`, which follows links and writes into devices. Files
inside a folder of the library (a run, a checkpoint) are written by `atomic_write`, which replaces a link: a
run made by somebody else must not redirect its files to another place.
"""

import errno
import json
import os
import secrets
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.parsing import parse_json
from polyformer.core.paths import check_file, check_folder, descriptor, is_replaceable, kind_of
from polyformer.core.ranges import JSON_BYTES

TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Names of types in the header, in the order from the end of a file to its beginning."""

ALIGNMENT = 8
"""The data begins at a multiple of this number of bytes: the header is padded with spaces."""


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of `tensors` in the order of their data in a file: larger types first.

    Raises `InputError` for a type that the format does not support.
    """
    order = list(TYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise InputError(
                f"{quote(name)} is of {tensor.dtype}, for which safetensors has no name; convert it first"
            )
    return sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name.encode()))


def write_one_by_one(path: Path, like: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, which are consumed one by one, to `path`, in the order `in_file_order(like)`.

    like: for every name a tensor of its type and shape, which may have no data (torch's "meta").
    Raises `OSError` if the disk is full.
    """
    names = in_file_order(like)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # more entries would have a random order
    end = 0
    for name in names:
        tensor = like[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = TYPES[tensor.dtype]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, tensor in zip(names, tensors, strict=True):
            assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype)
            if tensor.numel():
                file.write(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of `tensor`, copied only from another device or from a view with gaps."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
Write = Callable[[Path, bytes | Callable[[Path], object]], None]
"""`atomic_write` for a file inside a folder of the library, `write_output` for a file that a user names."""

PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def atomic_write(path: str | Path, content: bytes | Callable[[Path], object]) -> None:
    """Write `content` to `path` completely, or keep the old content (on any error, or a kill).

    `content` is the bytes, or a function that writes the file with the given name. Missing parent folders are
    created.
    Raises `InputError` if the disk is full or cannot be written.
    """
    path = Path(path)
    partial = _partial(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if callable(content):
                content(partial)
            else:
                partial.write_bytes(content)
            _sync(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        _sync(path.parent)


def write_output(path: str | Path, content: bytes | Callable[[Path], object]) -> None:
    """Write `content`, as in `atomic_write`, to a file named by a user.

    A regular file is replaced atomically. A symbolic link remains, and its target is replaced. A device, a
    FIFO and an open file of this process (/dev/stdout, /dev/fd/3) remain too: the content is written into
    them.

    Raises `InputError` for a directory, and if the disk is full or cannot be written.
    """
    path = Path(path)
    check_file(path)
    with writing(path):
        if is_replaceable(path):
            atomic_write(os.path.realpath(path) if path.is_symlink() else path, content)
        elif callable(content):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, path.name)
                content(file)
                _write_into(path, file)
        else:
            _write_into(path, content)


def _write_into(path: Path, content: bytes | Path) -> None:
    """Write bytes, or the content of a file, into the device, FIFO or open file that `path` names."""
    number = descriptor(path)
    if number is None:
        number = os.open(path, os.O_WRONLY | os.O_NOCTTY)  # without O_CREAT, so that it never creates a file
    else:
        sys.stdout.flush()  # earlier output comes first
        number = os.dup(number)
    with os.fdopen(number, "wb") as sink:
        if isinstance(content, bytes):
            sink.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, sink)


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a new folder to fill: it becomes `path` if the body succeeds and is removed if the body fails.

    An older folder is replaced. After a kill `path` is complete, old or new; between the two renames that
    replace an older folder, the older folder is called `.NAME.XXXXXXXX.partial`.
    Raises `InputError` if `path` is not a folder, and if the disk is full or cannot be written.
    """
    path = Path(path)
    partial, replaced = _partial(path), _partial(path)
    check_folder(path)
    with writing(path):
        try:
            partial.mkdir(parents=True)
            yield partial
            for folder, _, names in os.walk(partial):
                for name in names:
                    _sync(Path(folder, name))
                _sync(Path(folder))
            _exchange(partial, path, replaced)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _sync(path.parent)
        if replaced.is_symlink():
            replaced.unlink()
        else:
            shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def folder_for_files(path: str | Path) -> Iterator[None]:
    """Create a folder, if it is missing, for the files that the body writes.

    If the body fails, the folders that were created are removed with all files; an older folder keeps its
    files. Raises `InputError` if it cannot be created.
    """
    path = Path(path)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if missing:
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise


def _exchange(partial: Path, path: Path, replaced: Path) -> None:
    if not path.exists():
        partial.rename(path)
        return
    path.rename(replaced)
    try:
        partial.rename(path)
    except BaseException:
        replaced.rename(path)
        raise


def remove_directory(path: Path) -> None:
    """Remove a folder so that a kill in between never leaves a part of it under its name."""
    partial = _partial(path)
    with writing(path):
        path.rename(partial)
        shutil.rmtree(partial)


def remove_partials(folder: str | Path) -> None:
    """Remove the remains of killed writers in `folder`. Only for folders without other active writers."""
    for left in Path(folder).glob(".*.partial"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    # `secrets` does not change the seeded random states.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert the operating system's errors while writing `path` to `InputError`.

    `BrokenPipeError` passes: the reader has left, and nothing is wrong with `path`.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        number = error.errno or 0
        if number in NO_SPACE:
            raise InputError(
                f"cannot write {path}: no space left ({os.strerror(number)}); "
                "free some space or write to another disk; what was saved before is intact"
            ) from error
        if number:
            raise InputError(f"cannot write {path}: {os.strerror(number)}") from error
        raise


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors as safetensors, atomically; equal tensors give equal bytes.

    Names that share memory (tied weights) are stored once, under the first name, as usual in such files;
    readers must tie them again (`tied_names` lists them).
    """
    atomic_write(path, lambda partial: save_tensors(partial, tensors))


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors directly to `path`, for use inside `atomic_directory`, which syncs once for all files."""
    tied = tied_names(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}
    write_one_by_one(path, kept, (kept[name] for name in in_file_order(kept)))


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return every name that shares the memory of an earlier name -> the first such name."""
    seen: dict[tuple[object, ...], str] = {}
    firsts = {
        name: seen.setdefault(_memory(tensor), name) for name, tensor in tensors.items() if tensor.numel()
    }
    return {name: first for name, first in firsts.items() if first != name}


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
    return tensor.untyped_storage().data_ptr(), *layout


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name, on the CPU.

    Raises `InputError` if it is missing, damaged or a pickle.
    """
    path = Path(path)
    with reading(path):
        open_file(path).close()  # if it cannot be opened, the system's message is clearer than the library's
        try:
            return load_file(path)
        except SafetensorError:
            refuse_pickle(path)
            raise


def refuse_pickle(path: Path, fix: str = "convert it to safetensors where you trust it") -> None:
    """Raise `InputError`, with a `fix`, for a pickle; only for files that are not safetensors, as a header of
    640 bytes begins like one.
    """
    with open_file(path) as file:
        head = file.read(4)
    if head.startswith(PICKLES):
        raise InputError(f"{path} is a pickle, whose reading can run code, so it is refused; {fix}")


def write_json(path: str | Path, data: object) -> None:
    """Write `data` as indented JSON, atomically."""
    atomic_write(path, json_bytes(data))


def json_bytes(data: object) -> bytes:
    """Return `data` as indented JSON."""
    return (json.dumps(data, indent=2) + "\n").encode()


_DAMAGED = "; it is damaged: restore it from a copy or make it again"


def read_json(path: str | Path, expected: type = object) -> Any:
    """Return the content of a JSON file, an `expected` (dict, list); `InputError` if missing or damaged."""
    return parse_json(read_bounded(path, JSON_BYTES), path, expected, way_out=_DAMAGED)


def open_file(path: str | Path) -> BufferedReader:
    """Open a file to read its bytes.

    Raises `InputError` for a FIFO, where a reader would wait until somebody writes to it, and for a device,
    which may be endless. Files in somebody else's folder may be either.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise InputError(f"{path}: expected a file, got {kind_of(status)}")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a FIFO does not wait


def read_bounded(path: str | Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes; `InputError` if it is missing or larger."""
    with reading(path), open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(f"{path}: larger than {most} bytes, the most that is read of such a file")
    return content


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert errors while reading `path` to an `InputError` that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"no such file: {path}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except InputError:
        raise
    except SafetensorError as error:
        raise InputError(
            f"{path} is damaged or not safetensors ({error}); restore it from a copy or make it again"
        ) from error
