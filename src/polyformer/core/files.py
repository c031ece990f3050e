"""Files that are whole or absent: written beside the target, synced, renamed; errors name the file.

Weights are safetensors, everything else is JSON; nothing here ever reads a pickle, which can run code.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyformer.core.errors import InputError
from polyformer.core.parsing import JSON_BYTES, parse_json
from polyformer.core.tensor_files import in_file_order, write_one_by_one

NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def atomic_write(path: str | Path, content: bytes | Callable[[Path], object]) -> None:
    """Make `path` hold `content`, all of it or (on any error, or a kill) what it held before.

    `content` is the bytes, or a function that writes the file whose name it gets. Missing parent folders
    are made.
    Raises `InputError` when the disk is full or cannot be written.
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


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """A new folder to fill; becomes `path` when the body ends well, and is removed when it does not.

    An older `path` is replaced. A kill leaves `path` whole, old or new; in the one instant between the two
    renames that replace an older folder, the old one stands beside it as `.NAME.XXXXXXXX.partial`.
    Raises `InputError` when the disk is full or cannot be written.
    """
    path = Path(path)
    partial, replaced = _partial(path), _partial(path)
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
        shutil.rmtree(replaced, ignore_errors=True)


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
    """Remove a folder so that a kill in between never leaves half of it under its name."""
    partial = _partial(path)
    with writing(path):
        path.rename(partial)
        shutil.rmtree(partial)


def remove_partials(folder: str | Path) -> None:
    """Remove what killed writers left in `folder`. Only for folders that nobody else is writing to."""
    for left in Path(folder).glob(".*.partial"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    # `secrets` leaves the seeded random states alone.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns the operating system's refusals to write `path` into `InputError`."""
    try:
        yield
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
    """Write named tensors as safetensors, atomically; equal tensors make equal bytes.

    Names of the same memory (tied weights) are stored once, under the first, as is usual in such files;
    whoever reads them ties them again (`tied_names` says which).
    """
    atomic_write(path, lambda partial: save_tensors(partial, tensors))


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """`write_tensors` straight to `path`: for use inside `atomic_directory`, which syncs once for all."""
    tied = tied_names(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}
    write_one_by_one(path, kept, (kept[name] for name in in_file_order(kept)))


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Every name whose tensor is the same memory as an earlier one's -> the first such name."""
    seen: dict[tuple[object, ...], str] = {}
    firsts = {
        name: seen.setdefault(_memory(tensor), name) for name, tensor in tensors.items() if tensor.numel()
    }
    return {name: first for name, first in firsts.items() if first != name}


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
    return tensor.untyped_storage().data_ptr(), *layout


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """The named tensors of a safetensors file, on the CPU; `InputError` if missing, damaged or a pickle."""
    path = Path(path)
    with reading(path):
        path.open("rb").close()  # what cannot be opened: the system says it more clearly than the library
        try:
            return load_file(path)
        except SafetensorError:
            refuse_pickle(path)
            raise


def refuse_pickle(path: Path) -> None:
    """Only for what is not safetensors: a header of 640 bytes begins as a pickle does."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(PICKLES):
        raise InputError(
            f"{path} is a pickle (torch.save), not safetensors: reading one can run code, so it is refused; "
            "convert it to safetensors where you trust it"
        )


def write_json(path: str | Path, data: object) -> None:
    """Write `data` as indented JSON, atomically."""
    atomic_write(path, (json.dumps(data, indent=2) + "\n").encode())


_DAMAGED = "; it is damaged: restore it from a copy or make it again"


def read_json(path: str | Path, expected: type = object) -> Any:
    """What a JSON file holds, an `expected` (dict, list); `InputError` if it is missing or damaged."""
    return parse_json(read_bounded(path, JSON_BYTES), path, expected, way_out=_DAMAGED)


def read_bounded(path: str | Path, most: int) -> bytes:
    """The bytes of a file of at most `most`; `InputError` if it is missing or larger."""
    path = Path(path)
    with reading(path), path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(f"{path}: larger than {most} bytes, the most that is read of such a file")
    return content


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turns what goes wrong while reading `path` into an `InputError` that names it."""
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
