"""A divided model made whole again: its tensors gathered one after another on the first process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

KEPT = {"_parameters", "_buffers"}
"""What a module may hold other values of when it is put back."""


class Form:
    """How the modules of a model are before it is divided: their classes, hooks and attributes, no weights.

    `fully_shard` and `parallelize_module` change all of these in place, and have no way back of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [(module, type(module), _attributes(module)) for module in model.modules()]

    def restore(self) -> None:
        """Make the model plain again, with whole parameters in the first process, on the CPU, as a device may
        not hold them all; in the others with such as hold no numbers (on torch's "meta"). All call it."""
        whole: dict[int, nn.Parameter] = {}
        for parameter in self.model.parameters():
            tensor = gathered(parameter.detach())
            if tensor is None:
                tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            else:
                tensor = tensor.cpu()
            whole[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
        for module, kind, attributes in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = whole[id(parameter)]
            module.__class__ = kind
            _module_state_mapping.pop(module, None)
            for name in module.__dict__.keys() - attributes.keys() - KEPT:
                del module.__dict__[name]
            module.__dict__.update(attributes)
        if dist.get_rank() == 0:
            self.model.to("cpu")  # its buffers


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: type(value)(value) if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
        if name not in KEPT
    }


def gathered(tensor: Tensor) -> Tensor | None:
    """All of `tensor` in the first process, None in the others. Every process calls it."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole if dist.get_rank() == 0 else None


def of_whole(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """function(tensor), of the same shape, computed on the whole of it and divided as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    whole = function(tensor.full_tensor())
    part = tensor.to_local()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    own = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
    return DTensor.from_local(
        own.reshape(part.shape).contiguous(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
