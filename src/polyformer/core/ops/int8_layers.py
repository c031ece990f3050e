"""Modules with int8 weights: the weight of a head, a linear layer, token vectors."""

from collections.abc import Sequence

from torch import Tensor

from polyformer.core.ops.int8 import StackedWeights, dequantized, gpu_product, has_gpu_product, quantized
from polyformer.core.ops.linear import linear
from polyformer.core.ops.quantized_layers import QuantizedLinear, QuantizedWeight


class Int8Weight(QuantizedWeight):
    """A weight [O, I]: integers `weight` [O, I] and `scale` [O]; see `polyformer.core.ops.int8`."""

    scale: Tensor

    def __init__(self, weight: Tensor):
        super().__init__(weight)
        integers, scale = quantized(weight)
        self.register_buffer("weight", integers)
        self.register_buffer("scale", scale)

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in floating point."""
        return dequantized(self.weight, self.scale)

    def simple_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `product` on a GPU, or by the definition."""
        if has_gpu_product(x, self.weight):
            return gpu_product(x, self.weight, self.scale, bias)
        return super().simple_product(x, bias)

    def stacked(self, layers: "Sequence[Int8Weight]", biases: Sequence[Tensor | None]) -> StackedWeights:
        """Return layers in the formats of the fast methods."""
        return StackedWeights([layer.weight for layer in layers], [layer.scale for layer in layers], biases)


class Int8Linear(QuantizedLinear, Int8Weight):
    """A `Linear` with an int8 weight."""


class Int8Embedding(Int8Weight):
    """Token vectors in int8; looked-up rows are converted to float."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of the table: [...] -> [..., I]."""
        return self.weight[ids].to(self.scale.dtype) * self.scale[ids].unsqueeze(-1)


def matrix_product(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
    """Return x [..., I] times a weight [O, I] of either kind, plus bias [O]: [..., O]."""
    return weight.product(x, bias) if isinstance(weight, Int8Weight) else linear(x, weight, bias)


def as_matrix(weight: Tensor | Int8Weight) -> Tensor:
    """Return a weight [O, I] of either kind in floating point."""
    return weight.dequantized() if isinstance(weight, Int8Weight) else weight
