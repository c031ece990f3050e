"""Modules without trainable weights."""

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def detached(module: M) -> M:
    """Return the module with weights that get no gradient; memory and hooks of submodules are shared."""
    weights = {name: None if x is None else x.detach() for name, x in module._parameters.items()}
    parts = {name: None if part is None else detached(part) for name, part in module._modules.items()}
    twin = type(module).__new__(type(module))
    object.__setattr__(twin, "__dict__", {**module.__dict__, "_parameters": weights, "_modules": parts})
    return twin
