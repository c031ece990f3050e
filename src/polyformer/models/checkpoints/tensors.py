"""The tensors of a checkpoint, and their conversion to ours, with a record of every tensor.

They are read individually: safetensors in one file or several, pickles if allowed.
"""

import dataclasses
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_json, reading, refuse_pickle
from polyformer.core.paths import leaves_folder
from polyformer.models.checkpoints.family import Family, spellings
from polyformer.models.checkpoints.gguf import GgufTensors
from polyformer.models.checkpoints.key_mapping import Link, Part
from polyformer.models.config import ModelConfig
from polyformer.models.initialization import initialize

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
LONGEST_NAME = 255  # bytes of a file name, the limit of common file systems
# Suffixes of norms in the oldest files.
RENAMED = {".gamma": ".weight", ".beta": ".bias"}


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Tensors of files, read on access. files: the file of each tensor and its name there."""

    folder: Path
    files: dict[str, tuple[Path, str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self.files[name]
        with reading(path), safe_open(path, framework="pt") as file:
            return file.get_tensor(stored)


def open_tensors(folder: Path, allow_pickle: bool = False) -> "Tensors | dict[str, Tensor]":
    """Return the tensors in the folder of a checkpoint, by their names.

    Raises `InputError` for missing or damaged files, and for a pickle unless `allow_pickle`; a pickle is then
    restricted to tensors (`weights_only`), and no code in it runs.
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
            f"{pickles[0]} is a pickle, and there is no {SINGLE}: convert it if you trust it, or pass "
            f"allow_pickle=True, which reads only tensors and runs no code"
        )
    return {usual_name(name): x for path in pickles for name, x in _unpickled(path).items()}


def _names(path: Path) -> dict[str, tuple[Path, str]]:
    with reading(path):
        try:
            with safe_open(path, framework="pt") as file:
                return {usual_name(name): (path, name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:
            refuse_pickle(path)
            raise


def _indexed(folder: Path) -> dict[str, tuple[Path, str]]:
    files: dict[str, tuple[Path, str]] = {}
    listed = _weight_map(folder, INDEX)
    for path in _indexed_files(folder, INDEX, listed):
        files |= _names(path)
    for name in listed:
        if usual_name(name) not in files:
            raise InputError(f"{folder}: {INDEX} lists the tensor {quote(name)}, which no file has")
    return files


def _weight_map(folder: Path, index: str) -> dict[str, str]:
    """Return the file of each tensor from an index."""
    listed = read_json(folder / index, dict).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise InputError(
            f"{folder / index} is damaged: expected a 'weight_map' of names of tensors to names of "
            f"files, got {quote(listed)}; restore it from a copy"
        )
    return listed


def _indexed_files(folder: Path, index: str, listed: dict[str, str]) -> list[Path]:
    """Return the files that an index lists, which must be in its folder, since an index is untrusted."""
    names = sorted(set(listed.values()))
    for name in names:
        if (
            name in ("", ".", "..")
            or "/" in name
            or "\\" in name
            or "\0" in name
            or len(name.encode()) > LONGEST_NAME
        ):
            raise InputError(
                f"{folder / index}: lists {quote(name)}, expected names of files in its own folder"
            )
        if not (folder / name).is_file():
            raise InputError(f"no such file: {folder / name}, a part of the weights that {index} lists")
        if leaves_folder(folder, folder / name):
            raise InputError(
                f"{folder / name} is a link to a file outside of its folder, which an index may not name; "
                "put the file itself there"
            )
    return [folder / name for name in names]


def _pickles(folder: Path) -> list[Path]:
    if (folder / PICKLE_INDEX).is_file():
        return _indexed_files(folder, PICKLE_INDEX, _weight_map(folder, PICKLE_INDEX))
    return [folder / PICKLE] if (folder / PICKLE).is_file() else []


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle by name, memory-mapped if it is a zip file (since torch 1.6)."""
    with reading(path):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # warnings about pickles that torch did not write; they are read or refused
                content = torch.load(
                    path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
                )
        except pickle.UnpicklingError as error:
            raise InputError(
                f"{path} contains more than tensors and is refused: {refused(error)}; if you trust it, "
                f"load it with torch and save only model.state_dict()"
            ) from error
        # An error of the disk is no damage of the file.
        except OSError:
            raise
        except Exception as error:  # any error of the unpickler for bytes that are no pickle
            raise InputError(
                f"{path} is damaged or not a file of tensors ({first_line(error)}); restore it from a copy"
            ) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, expected tensors by name (a state dict)")
    for name, value in content.items():
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not isinstance(name, str) or not dense:
            what = f"tensor ({value.layout})" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"{path} holds a {what} under {quote(name)}, expected dense tensors by name (a state "
                f"dict); save only model.state_dict()"
            )
    return content


def refused(error: Exception) -> str:
    """Return the reason why the unpickler refused, without torch's advice to run it anyway."""
    said = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    return said[1][:120] if said else "what it would run is not known"


def first_line(error: Exception) -> str:
    """Return the first line of an error, at most 120 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def usual_name(name: str) -> str:
    """Return the name of a tensor, that of a norm in the oldest files as in others."""
    for old, new in RENAMED.items():
        if name.endswith("LayerNorm" + old):
            return name.removesuffix(old) + new
    return name


# A checkpoint's tensors by their names.
Stored = Tensors | GgufTensors | dict[str, Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class MatchedTensors:
    """The tensors that a model takes from a checkpoint."""

    weights: dict[str, Tensor]  # ours, by our names; empty after they are loaded
    newly_initialized: tuple[str, ...]  # names of ours that the checkpoint lacks
    unused: dict[str, Tensor]  # theirs without effect on the outputs, by their names in their class
    left: tuple[str, ...]  # names of theirs of another head


def match_tensors(
    family: Family, task: str, config: ModelConfig, stored: Stored, model: nn.Module, new_head: bool
) -> MatchedTensors:
    """Return the tensors of `model`, from a checkpoint of the family's `task`.

    new_head: whether tensors of the head that the checkpoint lacks are newly initialized. Raises `InputError`
    for tensors that are missing, misshapen or of another family.
    """
    own = model.state_dict(keep_vars=True)
    links = {link.theirs: link for link in family.links(config, task, own)}
    tied = family.tasks[task].tied_keys
    # `keys` shrinks to the tensors that no link has taken.
    known = {*links, *tied}
    keys = {resolve_prefix(family.usual_key(key), family.prefixes, known): key for key in stored}
    weights, unused, missing = _convert(links, tied, keys, stored, own)
    weights |= family.generated_tensors(own)
    numbered = {_without_numbers(theirs) for theirs in links} if keys else set()
    left: list[str] = []
    for name, key in keys.items():
        unused_key = family.unused_key(task, name) if name not in tied else None
        if unused_key is not None:
            unused[unused_key] = stored[key]
        elif not family.expects(name):
            raise unknown("tensor in the checkpoint", name, family.full_key_mapping(task))
        elif name not in tied and not family.ignores(name):
            if _without_numbers(name) in numbered:
                raise InputError(
                    f"the checkpoint has {quote(key)}, and config.json describes a model of fewer layers or "
                    "parts; they belong to different models"
                )
            left.append(key)
    held = {id(own[name]) for name in weights}  # a tied tensor has a second name
    absent = [name for name in own if name not in weights and id(own[name]) not in held]
    # Only a head may be new: a trunk with gaps belongs to another model.
    new = tuple(name for name in absent if new_head and name.startswith("head."))
    if len(new) < len(absent):
        raise InputError(
            f"the checkpoint lacks {', '.join(missing[:4]) or 'tensors'} "
            f"({len(absent) - len(new)} of the model's tensors in all)"
        )
    if new:
        # In the type of the checkpoint, which may be half precision.
        head = _new_head(config, next(iter(weights.values())).dtype)
        weights |= {name: head[name] for name in new}
    return MatchedTensors(weights, new, unused, tuple(left))


def _convert(
    links: Mapping[str, Link],
    tied: Mapping[str, str],
    keys: dict[str, str],
    stored: Stored,
    own: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return our, unused and missing tensors; remove the used names from `keys`."""
    weights: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    unused: dict[str, Tensor] = {}
    missing: list[str] = []
    parts: dict[str, list[Tensor]] = {}
    for theirs, link in links.items():
        # Files of untied classes may contain only the copy.
        copies = (copy for copy, source in tied.items() if source == theirs)
        key = next((name for name in (theirs, *copies) if name in keys), None)
        if key is None:
            missing.append(theirs)
            continue
        value = stored[keys.pop(key)]
        converted = link.converter.split(value)
        if not converted:
            unused[theirs] = value
        for name, tensor in zip(link.converter.ours, converted):
            if isinstance(link.converter, Part):
                _check_shape(key, name, tensor, link.converter.join([own[name]]))
                parts.setdefault(name, []).append(tensor)
                if len(parts[name]) < link.converter.count:
                    continue
                tensor = link.converter.whole(torch.cat(parts[name]))
            _check_shape(key, name, tensor, own[name])
            if name in sources:  # two of theirs for one of ours: an untied class only reads the latter
                unused[sources[name]] = weights[name]
            weights[name], sources[name] = tensor.contiguous(), theirs
    return weights, unused, missing


def _without_numbers(name: str) -> str:
    """Return a tensor's name without the numbers of layers and experts, which have further names."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def resolve_prefix(key: str, prefixes: Iterable[str], expected: Collection[str]) -> str:
    """Return a tensor's name in the files of a task, for any prefix of the trunk in its own file, or none."""
    return next((name for name in spellings(key, prefixes) if name in expected), key)


def _check_shape(theirs: str, name: str, tensor: Tensor, own: Tensor) -> None:
    if tensor.shape != own.shape:
        raise InputError(
            f"the checkpoint's {quote(theirs)} makes {quote(name)} of shape {tuple(tensor.shape)}, and "
            f"config.json requires shape {tuple(own.shape)}; they belong to different models"
        )


def _new_head(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    holder = nn.Module()
    holder.head = config.head.build(config.head_shape())
    initialize(holder, config.initializer_range)
    return dict(holder.to(dtype).state_dict())
