"""Initial weights, all of them decided here."""

import math
from collections.abc import Callable

import torch
from torch import nn

RESIDUAL = ("output.weight", "down.weight")
"""Last matrices of a sub-layer: what they write is added to the residual stream."""


Setting = Callable[[torch.Tensor, Callable[[torch.Tensor], object]], None]
"""Sets a parameter to what a function makes, in place, of a tensor of its shape."""

Draw = Callable[[nn.Module], None]
"""Draws the weights that a model was built without."""


def _in_place(weight: torch.Tensor, draw: Callable[[torch.Tensor], object]) -> None:
    draw(weight)


def initialize(model: nn.Module, initializer_range: float | None, set_to: Setting = _in_place) -> None:
    """Sets every weight in place.

    | part                      | range given           | None (the scheme of 2017)    |
    |---------------------------|-----------------------|------------------------------|
    | embeddings, vocabulary    | normal(range)         | normal(1 / sqrt(E))          |
    | matrices                  | normal(range)         | uniform, Glorot              |
    | last matrix of a sub-layer| range / sqrt(2 layers)| as other matrices            |
    | biases; norms             | 0; 1 and 0            | the same                     |

    The scaling of last matrices is GPT-2's (Radford et al. 2019, section 2.3). With parameters on the `meta`
    device nothing is done: torch would work out every shape again, which takes most of the time of building
    a model there. `set_to` is called for all but that scaling, and in the same order whatever it does.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                set_to(module.weight, lambda weight: _matrix(weight, initializer_range))
                if module.bias is not None:
                    set_to(module.bias, torch.Tensor.zero_)
            elif isinstance(module, nn.Embedding):
                set_to(module.weight, lambda weight: _vectors(weight, initializer_range))
        for name, parameter in model.named_parameters():
            if name == "head.weight":
                set_to(parameter, lambda weight: _vectors(weight, initializer_range))
        if initializer_range is not None:
            _shrink_residual(model)


def _matrix(weight: torch.Tensor, deviation: float | None) -> None:
    if deviation is None:
        nn.init.xavier_uniform_(weight)
    else:
        weight.normal_(0.0, deviation)


def _vectors(weight: torch.Tensor, deviation: float | None) -> None:
    weight.normal_(0.0, 1 / math.sqrt(weight.shape[1]) if deviation is None else deviation)


def _shrink_residual(model: nn.Module) -> None:
    """So that the residual stream's variance does not grow with the number of layers."""
    for stack in ("encoder", "decoder"):
        part = getattr(model, stack, None)
        if part is None:
            continue
        for name, parameter in part.layers.named_parameters():
            if name.endswith(RESIDUAL):
                parameter.div_(math.sqrt(2 * len(part.groups)))
