"""Activation functions by name."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import unknown


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "quick_gelu"]
"""The type of an option that names an activation."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": quick_gelu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function called `name`; raises `InputError` with the nearest names."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]
