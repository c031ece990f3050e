"""Deferred initialization: weights of sharded models are drawn one by one, and no process holds all.

A model is built with every matrix dropped as soon as it is registered in its module (it is then on the "meta"
device), and sharded. Each matrix is then drawn in turn, whole, from the same random numbers as in a model
built whole, and every process keeps its shard: the initial weights are bit for bit the same.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from polyformer.models.architectures import Transformer
from polyformer.models.initialization import Draw, fillings, shrink_residual
from polyformer.training.distributed.full_state_dict import local_part

LARGE = 1 << 18
"""Minimum size in bytes of a tensor with separate memory pages."""


@contextmanager
def deferred_initialization() -> Iterator[None]:
    """Build models without the values that `initialize` would set, inside this context."""
    handle = register_module_module_registration_hook(_move_to_meta)
    try:
        with _SeparatePages():
            yield
    finally:
        handle.remove()


class _SeparatePages(TorchFunctionMode):
    """Allocate large tensors in separate pages, which are returned to the system when the tensors are freed.

    Between small tensors that stay, an allocator would keep the memory of most of the freed tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return func(*args, **kwargs), with the memory of a large `torch.empty` from `mmap`."""
        kwargs = kwargs or {}
        if func is not torch.empty or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta"})
        if like.nbytes < LARGE:
            return func(*args, **kwargs)
        return torch.frombuffer(mmap.mmap(-1, like.nbytes), dtype=like.dtype).view(like.shape)


def _move_to_meta(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Move the parameters that `initialize` sets from `module`, the child `name` of `parent`, to "meta"."""
    if module is None:
        return
    set_later = isinstance(module, nn.Linear | nn.Embedding)
    head = isinstance(parent, Transformer) and name == "head"
    for key in ("weight", "bias") if set_later else ("weight",) if head else ():
        parameter = module._parameters.get(key)
        if parameter is not None:
            module._parameters[key] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def materialize(model: nn.Module, device: torch.device, draw: Draw | None) -> None:
    """Allocate on `device` the shards of parameters that have no values yet, and fill them by `draw`.

    Without `draw` they must be loaded from a checkpoint.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if draw is not None:
        draw(model)


def deferred_draw(model: nn.Module, initializer_range: float | None) -> Draw:
    """Return a function that draws the missing weights of `model` after it is sharded and allocated.

    It uses the random numbers that follow now.
    """
    state, order = torch.get_rng_state(), [*fillings(model, initializer_range)]

    @torch.no_grad()
    def draw(divided: nn.Module) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            for module, name, fill in order:  # also weights of other processes, to advance the random numbers
                weight = getattr(module, name)
                whole = torch.empty(weight.shape, dtype=weight.dtype)
                fill(whole)
                if isinstance(weight, DTensor):
                    weight.to_local().copy_(local_part(whole, weight))
                elif not weight.is_meta:  # else only other processes have it
                    weight.copy_(whole)
        shrink_residual(divided, initializer_range)

    return draw
