"""Tensors of divided models in files: every process writes its parts, and reads those of any other division.

By torch's distributed checkpoint in the form of safetensors, which no process has to gather and nobody has to
unpickle. A file says where in the whole each of its parts lies; whole tensors in one file are the simplest
case, so that a plain run and a divided one read each other's.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from polyformer.core.errors import InputError, quote
from polyformer.parallel.stages import Absent


def is_divided(model: nn.Module) -> bool:
    """Whether this process holds only a part of some of the parameters, or only some of them."""
    parts = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return parts or any(isinstance(module, Absent) for module in model.modules())


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """Whether the parameter `name` is of a module that other processes have."""
    path = name.split(".")
    return any(isinstance(_module(model, path[:depth]), Absent) for depth in range(1, len(path)))


def _module(model: nn.Module, path: list[str]) -> nn.Module | None:
    """The module at `path`; None where there is none."""
    module: nn.Module | None = model
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module


def once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that are one object once, under their first name, and without their graph."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write what this process holds of `tensors` into `folder`, which is there; all of `group` call it.

    An error in any of them is raised in all; `OSError` where a disk is full or refuses.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(once(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        system = next((cause for cause in causes if isinstance(cause, OSError)), None)
        raise system or error from error


def parts_written(folder: Path) -> list[Path]:
    """The files in `folder` that this process has written."""
    return sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))


def stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Sizes and types of the whole tensors whose parts lie in `folder`, by name."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def read_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`, whole ones or this process's parts, with what `folder` holds under their names.

    Of what is one object the first name counts. No process waits for another. Raises `InputError` for a
    tensor that is not there or of another shape.
    """
    wanted, there = once(tensors), stored(folder)
    for name, tensor in wanted.items():
        if name not in there:
            raise InputError(f"{folder}: no tensor {quote(name)}; it is of another model")
        if there[name].size != tensor.shape:
            raise InputError(
                f"{folder}: {quote(name)} is {list(there[name].size)} there, {list(tensor.shape)} here; "
                "it is of another model"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def shown_to_all(folder: Path | None, group: dist.ProcessGroup | None = None) -> Path:
    """The first process's `folder`, in every process; all must reach it, on a disk that machines share."""
    named = [str(folder)]
    dist.broadcast_object_list(named, group=group)
    return Path(named[0])


def raise_together(complaint: str | None, group: dist.ProcessGroup | None = None) -> None:
    """`InputError` in every process, with the first complaint that any of them has; all call it."""
    complaints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint, group=group)
    for text in complaints:
        if text is not None:
            raise InputError(text)
