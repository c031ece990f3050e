"""A checkpoint's tensors, read one at a time: safetensors in one file or several, pickles where allowed."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.files import read_json, reading, refuse_pickle

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
RENAMED = {".gamma": ".weight", ".beta": ".bias"}
"""Endings of norms in the oldest files."""


@dataclasses.dataclass(frozen=True)
class Tensors:
    """`files`: their names of tensors, and the file and name by which each is found."""

    folder: Path
    files: dict[str, tuple[Path, str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self.files[name]
        with reading(path), safe_open(path, framework="pt") as file:
            return file.get_tensor(stored)


def open_tensors(folder: Path, allow_pickle: bool = False) -> "Tensors | dict[str, Tensor]":
    """What the folder of a checkpoint holds, by their names.

    Raises `InputError` for missing or damaged files, and for a pickle unless `allow_pickle`; one is then read
    as tensors alone (`weights_only`), and no code in it runs.
    """
    if (folder / INDEX).is_file():
        return Tensors(folder, _indexed(folder))
    if (folder / SINGLE).is_file():
        return Tensors(folder, _names(folder / SINGLE))
    pickles = _pickles(folder)
    if not pickles:
        raise InputError(f"{folder}: no weights in it ({SINGLE} or {INDEX})")
    if not allow_pickle:
        raise InputError(
            f"{pickles[0]} is a pickle, and there is no {SINGLE}: convert it where you trust it, or allow it "
            f"with allow_pickle=True, which reads tensors alone and runs no code"
        )
    return {_renamed(name): one for path in pickles for name, one in _unpickled(path).items()}


def _names(path: Path) -> dict[str, tuple[Path, str]]:
    with reading(path):
        try:
            with safe_open(path, framework="pt") as file:
                return {_renamed(name): (path, name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            refuse_pickle(path)
            raise


def _indexed(folder: Path) -> dict[str, tuple[Path, str]]:
    found: dict[str, tuple[Path, str]] = {}
    listed = read_json(folder / INDEX)
    if not isinstance(listed, dict) or not isinstance(listed.get("weight_map"), dict):
        raise InputError(f"{folder / INDEX} is damaged: it has no 'weight_map'; restore it from a copy")
    for name in sorted(set(listed["weight_map"].values())):
        if not (folder / name).is_file():
            raise InputError(f"no such file: {folder / name}, a part of the weights that {INDEX} lists")
        found |= _names(folder / name)
    for name in listed["weight_map"]:
        if _renamed(name) not in found:
            raise InputError(f"{folder}: {INDEX} lists the tensor {name!r}, which no file has")
    return found


def _pickles(folder: Path) -> list[Path]:
    if (folder / PICKLE_INDEX).is_file():
        names = read_json(folder / PICKLE_INDEX)["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return [folder / PICKLE] if (folder / PICKLE).is_file() else []


def _unpickled(path: Path) -> dict[str, Tensor]:
    with reading(path):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, EOFError, KeyError) as error:
            raise InputError(f"{path} is damaged or not a file of tensors ({error})") from error
        except Exception as error:  # the unpickler's own, which names what it would not run
            raise InputError(f"{path} holds more than tensors and is refused: {error}") from error


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        if name.endswith("LayerNorm" + old):
            return name.removesuffix(old) + new
    return name
