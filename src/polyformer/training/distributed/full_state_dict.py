"""Conversion of a sharded model back to a plain model: its tensors are gathered and written one by one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from polyformer.core.files import atomic_write, in_file_order, read_tensors, write_one_by_one
from polyformer.training.distributed.fully_sharded import full_tensor
from polyformer.training.distributed.sharded_files import shared_errors

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


def apply_to_full_tensor(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return function(tensor), of the same shape, computed on the whole tensor and sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    whole = function(tensor.full_tensor())
    own = local_part(whole, tensor)
    return DTensor.from_local(
        own.contiguous(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_part(whole: Tensor, like: DTensor) -> Tensor:
    """Return the local shard of `whole`, sharded like `like`, as a view."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    own = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
    return own.reshape(like.to_local().shape)
