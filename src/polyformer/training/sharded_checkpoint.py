"""Sharded checkpoints, and loading of sharded or plain checkpoints into sharded or plain models.

CHECKPOINT/model/shard-00001-....safetensors        weights and buffers of the first process
           optimizer/shard-00001-....safetensors    optimizer tensors of the first process, by NAME/KEY
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from polyformer.core.errors import InputError
from polyformer.training.distributed.sharded_files import (
    is_on_other_rank,
    is_sharded,
    local_shard_files,
    read_shards,
    shared_errors,
    stored_tensors,
    write_shards,
)
from polyformer.training.state import (
    MODEL_PARTS,
    OPTIMIZER_PARTS,
    file_digest,
    has_parts,
    set_optimizer_state,
)


def write_sharded(
    folder: Path,
    weights: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> dict[str, str]:
    """Write the shards of this process into `folder`. Collective: every process calls it.

    Returns, in the first process, the checksums of all files by their names in `folder`.
    """
    digests: dict[str, str] = {}
    for name, tensors in ((MODEL_PARTS, weights), (OPTIMIZER_PARTS, optimizer)):
        (folder / name).mkdir(exist_ok=True)
        write_shards(folder / name, tensors, group)
        digests |= {f"{name}/{path.name}": file_digest(path) for path in local_shard_files(folder / name)}
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(digests, every, group=group)
    return {name: digest for part in every or () for name, digest in part.items()}


def read_model(path: Path, digests: dict[str, str], model: nn.Module) -> None:
    """Load weights and buffers of a sharded or plain checkpoint `path` into a sharded or plain `model`."""
    check_files(path, digests, is_sharded(model))
    read_shards(path / MODEL_PARTS if has_parts(path) else path, model.state_dict(keep_vars=True))


def read_optimizer(
    path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the state of `optimizer` from checkpoint `path`; `state` is the content of its state.json."""
    folder = path / OPTIMIZER_PARTS if has_parts(path) else path
    parameters = dict(model.named_parameters())
    tensors = {}
    for place, entry in stored_tensors(folder).items() if any(folder.iterdir()) else ():
        name, _, key = place.rpartition("/")
        if not key or not name:
            continue  # the folder of a plain checkpoint also contains the weights
        if is_on_other_rank(model, name):
            continue
        like = parameters.get(name)
        if like is not None and like.shape == entry.size:
            tensors[place] = torch.zeros_like(like, dtype=entry.properties.dtype)
        else:
            tensors[place] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    if tensors:
        read_shards(folder, tensors)
    scalars = {
        place: value
        for place, value in state["optimizer"]["scalars"].items()
        if not is_on_other_rank(model, place.rpartition("/")[0])
    }
    saved = {**state["optimizer"], "scalars": scalars}
    set_optimizer_state(folder, model, optimizer, tensors, saved)


def check_files(path: Path, digests: dict[str, str], together: bool) -> None:
    """Raise `InputError` if a file of checkpoint `path` is missing or differs from its checksum.

    With `together` the processes share the files, and all of them raise an error found by any.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    with shared_errors() if together else nullcontext():
        for name in sorted(digests)[rank::world]:
            if not (path / name).is_file():
                raise InputError(f"no such file: {path / name}")
            if file_digest(path / name) != digests[name]:
                raise InputError(f"{path / name} is damaged: its bytes are not those written")
