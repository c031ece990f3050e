"""Sharded tensors in files: every process writes its shards, and can read the files of any other sharding.

Uses torch's distributed checkpoint in the safetensors format, so that no process gathers tensors and nothing
is unpickled. Each file records the position of its shards in the whole tensors. Whole tensors in one file are
a special case, so that plain and sharded runs can read each other's checkpoints.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from polyformer.training.distributed.pipeline_stages import Placeholder


def is_sharded(model: nn.Module) -> bool:
    """Return whether this process has only a shard of some parameters, or only some of the parameters."""
    parts = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return parts or any(isinstance(module, Placeholder) for module in model.modules())


def is_on_other_rank(model: nn.Module, name: str) -> bool:
    """Return whether the parameter `name` belongs to a module that only other processes have."""
    absent = (prefix for prefix, module in model.named_modules() if isinstance(module, Placeholder))
    return any(name.startswith(f"{prefix}.") for prefix in absent)


def unique_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, detached; tensors that are the same object appear once, under their first name."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write the shards of this process of `tensors` into the existing `folder`. Collective over `group`.

    An error in any process is raised in all; `OSError` for a full disk or a failed write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(unique_tensors(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        system = next((cause for cause in causes if isinstance(cause, OSError)), None)
        raise system or error from error


def local_shard_files(folder: Path) -> list[Path]:
    """Return the files in `folder` that this process has written."""
    return sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return sizes and dtypes of the whole tensors with shards in `folder`, by name."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`, whole tensors or local shards, from the tensors of the same names in `folder`.

    Tied tensors are read under their first name. No process waits for another. Raises `InputError` for a
    tensor that is missing or has another shape.
    """
    wanted, there = unique_tensors(tensors), stored_tensors(folder)
    for name, tensor in wanted.items():
        if name not in there:
            raise InputError(f"{folder}: no tensor {quote(name)}; it belongs to another model")
        if there[name].size != tensor.shape:
            raise InputError(
                f"{folder}: {quote(name)} is {list(there[name].size)} there, {list(tensor.shape)} here; "
                "it belongs to another model"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def broadcast_path(folder: Path | None, group: dist.ProcessGroup | None = None) -> Path:
    """Broadcast the `folder` of the first process; it must be on a file system shared by all machines."""
    named = [str(folder)]
    dist.broadcast_object_list(named, group=group)
    return Path(named[0])


@contextmanager
def shared_errors(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the first `InputError` of any process in all of them, after the body. Collective."""
    complaint = None
    try:
        yield
    except InputError as error:
        complaint = str(error)
    complaints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint, group=group)
    for text in complaints:
        if text is not None:
            raise InputError(text)
