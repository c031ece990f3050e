"""Initial weights of all models."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

RESIDUAL = ("output.weight", "down.weight")
"""The last matrices of a sub-layer: their output is added to the residual stream."""


Filling = Callable[[torch.Tensor], object]
"""A function that fills a tensor in place."""

Draw = Callable[[nn.Module], None]
"""A function that draws the weights of a model that was built without them."""


def initialize(model: nn.Module, initializer_range: float | None) -> None:
    """Set every weight in place.

    | part                      | range given           | None (the scheme of 2017)    |
    |---------------------------|-----------------------|------------------------------|
    | embeddings, vocabulary    | normal(range)         | normal(1 / sqrt(E))          |
    | matrices                  | normal(range)         | uniform, Glorot              |
    | last matrix of a sub-layer| range / sqrt(2 layers)| as other matrices            |
    | the same, `zero_branches` | 0                     | 0                            |
    | biases; norms             | 0; 1 and 0            | the same                     |

    The scaling of last matrices is GPT-2's (Radford et al. 2019, section 2.3). With zeros a sub-layer adds
    nothing at first, as in Fixup (Zhang et al. 2019, section 3), and a pre-norm stack is the identity. With
    parameters on the `meta` device nothing is done: torch would work out every shape again, which takes most
    of the time of building a model there.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    with torch.no_grad():
        for module, name, fill in fillings(model, initializer_range):
            fill(getattr(module, name))
        shrink_residual(model, initializer_range)


def fillings(model: nn.Module, initializer_range: float | None) -> Iterator[tuple[nn.Module, str, Filling]]:
    """Yield what `initialize` draws, in order: a module, a parameter's name, the function that fills it."""

    def matrix(weight: torch.Tensor) -> None:
        if initializer_range is None:
            nn.init.xavier_uniform_(weight)
        else:
            weight.normal_(0.0, initializer_range)

    def vectors(weight: torch.Tensor) -> None:
        # 1 / sqrt(E), so that vectors times sqrt(E) have entries of variance 1.
        weight.normal_(0.0, weight.shape[1] ** -0.5 if initializer_range is None else initializer_range)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module, "weight", matrix
            if module.bias is not None:
                yield module, "bias", torch.Tensor.zero_
        elif isinstance(module, nn.Embedding):
            yield module, "weight", vectors
    head = getattr(model, "head", None)
    if head is not None and isinstance(getattr(head, "weight", None), nn.Parameter):
        yield head, "weight", vectors


def shrink_residual(model: nn.Module, initializer_range: float | None) -> None:
    """Scale residual outputs so that the variance does not grow with depth, only with a range; or set them
    to 0 if the configuration has `zero_branches`."""
    zero = getattr(getattr(model, "config", None), "zero_branches", False)
    if initializer_range is None and not zero:
        return
    for stack in ("encoder", "decoder"):
        part = getattr(model, stack, None)
        if part is None:
            continue
        for name, parameter in part.layers.named_parameters():
            if name.endswith(RESIDUAL) and zero:
                parameter.zero_()
            elif name.endswith(RESIDUAL):
                parameter.div_(math.sqrt(2 * len(part.groups)))
