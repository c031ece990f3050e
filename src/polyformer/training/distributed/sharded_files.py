"""Files of sharded models: checkpoints with a file per process, and whole models at the end.

CHECKPOINT/model/shard-00001-....safetensors        weights and buffers of the first process
           optimizer/shard-00001-....safetensors    optimizer tensors of the first process, by NAME/KEY

Every process writes its shards, and can read the files of any other sharding. This uses torch's distributed
checkpoint in the safetensors format, so that no process gathers tensors and nothing is unpickled. Each file
records the position of its shards in the whole tensors. Whole tensors in one file are a special case, so that
plain and sharded runs can read each other's checkpoints.

At the end of training a sharded model is converted back to a plain model: its tensors are gathered and
written one by one.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from polyformer.core.errors import InputError, quote
from polyformer.core.files import (
    atomic_directory,
    atomic_write,
    in_file_order,
    read_tensors,
    write_one_by_one,
    writing,
)
from polyformer.training.checkpoint import (
    MODEL_PARTS,
    OPTIMIZER_PARTS,
    Checkpoints,
    Snapshot,
    file_digest,
    has_parts,
    set_optimizer_state,
)
from polyformer.training.distributed.fully_sharded import full_tensor
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


def checkpoint_group(timeout: float | None) -> dist.ProcessGroup:
    """Create a gloo group of all processes, on the CPU, for checkpoints. Collective: every process calls it.

    Its messages do not mix with the collectives of training. timeout: seconds that the processes wait for
    each other; None uses the default of torch.
    """
    wait = None if timeout is None else timedelta(seconds=timeout)
    group = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(group, dist.ProcessGroup)
    return group


class ShardedCheckpoints(Checkpoints):
    """The same `checkpoints`, each a snapshot of the shards of all processes of `group`."""

    def __init__(self, checkpoints: Checkpoints, group: dist.ProcessGroup) -> None:
        super().__init__(checkpoints.folder.parent, checkpoints.every, checkpoints.keep)
        self.group = group

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint; `snapshot` is the shard of this process. Collective over the group.

        The first process creates the folder. When all shards are written, it writes the state and renames
        the folder, so that the checkpoint is either complete or absent.
        """
        first, path = dist.get_rank() == 0, self.path(snapshot.progress.step)
        with shared_errors(self.group):
            with ExitStack() as opened:
                folder = None
                with shared_errors(self.group):
                    folder = opened.enter_context(atomic_directory(path)) if first else None
                folder = broadcast_path(folder, self.group)
                with writing(path):
                    digests = write_sharded(folder, snapshot.weights, snapshot.optimizer, self.group)
                if first:
                    snapshot.write_rest(folder, digests)
            if first:
                self.prune(snapshot.progress.best_step)


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


STATE_ATTRIBUTES = {"_parameters", "_buffers"}
"""Attributes of a module that may have changed when it is restored."""

Fetch = Callable[[Tensor], Tensor | None]
"""A collective that returns a whole tensor in the first process, None in the others, in a fixed order."""


class UnshardedModel:
    """The modules of a model before sharding: their classes, hooks and attributes, without weights.

    `fully_shard` and `parallelize_module` change all of these in place, and cannot be reverted otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [(module, type(module), _attributes(module)) for module in model.modules()]

    def restore(self, fetch: Fetch, files: Mapping[Path, nn.Module]) -> None:
        """Write submodules of the model to files, then make it plain again. Collective.

        files: the modules to write, as safetensors, by path. The first process has whole tensors afterwards:
        memory maps of the files, which the system may page out, and all others on the CPU, because a device
        may be too small for all. Parameters of the other processes have no values (they are on the "meta"
        device). Raises `InputError` in every process if a file cannot be written.
        """
        whole: dict[int, Tensor] = {}
        for path, module in files.items():
            whole |= gather_full_state_dict(path, module, fetch)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if id(tensor) not in whole:
                got = fetch(tensor)
                whole[id(tensor)] = _empty(tensor) if got is None else got.detach().cpu()
        parameters = {
            id(parameter): nn.Parameter(whole[id(parameter)], parameter.requires_grad)
            for parameter in self.model.parameters()
        }
        for module, kind, attributes in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = parameters[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:  # of a module in other processes
                    module._buffers[name] = whole[id(buffer)]
            module.__class__ = kind
            _module_state_mapping.pop(module, None)
            for name in module.__dict__.keys() - attributes.keys() - STATE_ATTRIBUTES:
                del module.__dict__[name]
            module.__dict__.update(attributes)
        if dist.get_rank() == 0:
            self.model.to("cpu")  # its buffers


def gather_full_state_dict(path: Path, module: nn.Module, fetch: Fetch) -> dict[int, Tensor]:
    """Write the tensors of a sharded `module` to `path`, tied tensors once, gathered one by one.

    Returns the tensors by the `id` of the previous tensors, as memory maps of the file in the first process.
    """
    named = module.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), name)
    tensors = {name: named[name] for name in names.values()}
    whole = (tensor for name in in_file_order(tensors) if (tensor := fetch(tensors[name])) is not None)
    with shared_errors():
        try:
            if dist.get_rank() == 0:
                atomic_write(path, lambda partial: write_one_by_one(partial, tensors, whole))
        finally:
            for _ in whole:
                pass  # after a full disk, still receive the tensors that the other processes send
    stored = read_tensors(path) if dist.get_rank() == 0 else {}
    return {id(tensor): stored.get(name, _empty(tensor)) for name, tensor in tensors.items()}


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: type(value)(value) if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
        if name not in STATE_ATTRIBUTES
    }


def gather_tensor(tensor: Tensor) -> Tensor | None:
    """Return the whole of `tensor` in the first process, None in the others. Collective."""
    whole = full_tensor(tensor)
    return whole if dist.get_rank() == 0 else None
