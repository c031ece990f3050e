"""Feed-forward layers with weights of few bits, rounded in training too; a recipe imports this module.

    w' = s round(w / s)        s = max |w| / (2^(bits - 1) - 1) of each row of a matrix

In training the gradient passes the rounding unchanged: the straight-through estimator of Bengio et al. 2013,
used for integers by Jacob et al. 2018, section 3.
"""

import dataclasses
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.utils import parametrize

from polyformer.nn.feedforward.feedforward import Dense, DenseConfig

Bits = Annotated[int, Interval(ge=2, le=16)]


class Rounding(nn.Module):
    """The rounding of a matrix, with the gradient of the identity."""

    def __init__(self, bits: int):
        super().__init__()
        self.largest = 2 ** (bits - 1) - 1

    def forward(self, weight: Tensor) -> Tensor:
        """Return weight [O, I] on a grid of 2 largest + 1 numbers per row."""
        step = weight.detach().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        step = step / self.largest
        return weight + (step * (weight.detach() / step).round() - weight.detach())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundedConfig(DenseConfig):
    """Dense feed-forward layer with matrices that are rounded in every pass."""

    bits: Bits = 4

    kind: ClassVar[str] = "rounded"
    paper: ClassVar[str] = "Jacob et al. 2018, section 3"

    def build(self, hidden_size: int) -> Dense:
        """Return a dense layer with rounded matrices."""
        return with_rounding(super().build(hidden_size), self.bits)


def with_rounding(layer: Dense, bits: int) -> Dense:
    """Round the two matrices of a layer in every pass, and return the layer."""
    for linear in (layer.up, layer.down):
        parametrize.register_parametrization(linear, "weight", Rounding(bits))
    return layer
