"""Models to be divided whose weights are drawn part by part, so that no process ever holds all of them.

A model is built with every matrix dropped as soon as it stands in its module (it is then on torch's "meta"),
and divided. Then each matrix is drawn in turn, whole, from the random numbers that it would have been drawn
from, and every process keeps its part: the first weights are, bit for bit, those of a model built whole.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from polyformer.core.initialization import Draw, fillings, shrink_residual
from polyformer.model import Transformer
from polyformer.parallel.whole import own_part

LARGE = 1 << 18
"""Bytes of a tensor from which on it lies in pages of its own."""


@contextmanager
def late_weights() -> Iterator[None]:
    """While it lasts, models are built without the numbers that `initialize` would set."""
    handle = register_module_module_registration_hook(_drop)
    try:
        with _OwnPages():
            yield
    finally:
        handle.remove()


class _OwnPages(TorchFunctionMode):
    """Large tensors are made in pages that go back to the system with them: between small ones that stay, an
    allocator would keep the room of most that are dropped."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """func(*args, **kwargs)."""
        kwargs = kwargs or {}
        if func is not torch.empty or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta"})
        if like.nbytes < LARGE:
            return func(*args, **kwargs)
        return torch.frombuffer(mmap.mmap(-1, like.nbytes), dtype=like.dtype).view(like.shape)


def _drop(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Take out of `module`, which becomes the child `name` of `parent`, what `initialize` sets."""
    if module is None:
        return
    set_later = isinstance(module, nn.Linear | nn.Embedding)
    head = isinstance(parent, Transformer) and name == "head"
    for key in ("weight", "bias") if set_later else ("weight",) if head else ():
        parameter = module._parameters.get(key)
        if parameter is not None:
            module._parameters[key] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def move(model: nn.Module, device: torch.device) -> None:
    """Bring what `model` has numbers of to `device`."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def complete(model: nn.Module, device: torch.device, draw: Draw | None) -> None:
    """Make room on `device` for this process's parts of what a divided model has no numbers of, if there is
    any, and let `draw` fill it; without, a checkpoint must."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if draw is not None:
        draw(model)


def drawing(model: nn.Module, initializer_range: float | None) -> Draw:
    """What draws the missing weights of `model`, just built, when it is divided and has room for them: from
    the random numbers that follow now."""
    state, order = torch.get_rng_state(), [*fillings(model, initializer_range)]

    @torch.no_grad()
    def draw(divided: nn.Module) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            for module, name, fill in order:  # those of other processes too: random numbers come in turn
                weight = getattr(module, name)
                whole = torch.empty(weight.shape, dtype=weight.dtype)
                fill(whole)
                _set(weight, whole)
        shrink_residual(divided, initializer_range)

    return draw


def _set(weight: Tensor, whole: Tensor) -> None:
    """This process's part of `whole` into its part of `weight`, if it has any."""
    if isinstance(weight, DTensor):
        weight.to_local().copy_(own_part(whole, weight))
    elif not weight.is_meta:
        weight.copy_(whole)
