"""Modules with int8 weights: the weight of a head, a linear layer, token vectors."""

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

from polyformer.core.ops.int8 import (
    StackedWeights,
    dequantized,
    dequantized_product,
    gpu_product,
    has_fast_product,
    has_gpu_product,
    product,
    quantized,
)
from polyformer.core.ops.linear import linear


class Int8Weight(nn.Module):
    """A weight [O, I]: integers `weight` [O, I] and `scale` [O]; see `polyformer.core.ops.int8`.

    joined: the formats of the fast methods, by the number of layers that share them; built when needed and
    not part of the module's state.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        integers, scale = quantized(weight)
        self.register_buffer("weight", integers)
        self.register_buffer("scale", scale)
        self.joined: dict[int, StackedWeights] = {}

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in floating point."""
        return dequantized(self.weight, self.scale)

    def product(self, x: Tensor, bias: Tensor | None = None, exact: bool = True) -> Tensor:
        """Return x [..., I] times the weight transposed, plus bias [O]: [..., O]. exact: not in bfloat16."""
        if has_gpu_product(x, self.weight):
            return gpu_product(x, self.weight, self.scale, bias)
        if not has_fast_product(x, self.weight):
            return dequantized_product(x, self.weight, self.scale, bias)
        return product(x, self.join([self], [bias]), exact)

    def join(self, layers: "Sequence[Int8Weight]", biases: Sequence[Tensor | None]) -> StackedWeights:
        """Return the weights of `layers`, beginning with this one, in the formats of the fast methods."""
        weights, scales = [layer.weight for layer in layers], [layer.scale for layer in layers]
        sources = [*weights, *scales, *(bias for bias in biases if bias is not None)]
        joined = self.joined.get(len(layers))
        if joined is None or len(sources) != len(joined.sources) or not joined.is_of(sources):
            joined = self.joined[len(layers)] = StackedWeights(weights, scales, biases)
        return joined

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "joined": {}}

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        self.joined = {}
        return super()._apply(*arguments, **options)


class Int8Linear(Int8Weight):
    """A `Linear` with an int8 weight; the bias is not quantized."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(weight)
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Return y = x weight^T + bias: [..., I] -> [..., O]."""
        return self.product(x, self.bias, exact=False)

    @staticmethod
    def together(x: Tensor, layers: "Sequence[nn.Module]") -> list[Tensor] | None:
        """Return the outputs of layers for the same x, from one product; None if they must run separately."""
        own = [layer for layer in layers if type(layer) is Int8Linear and not _is_watched(layer)]
        if len(own) < len(layers) or not has_fast_product(x, own[0].weight):
            return None
        y = product(x, own[0].join(own, [layer.bias for layer in own]), exact=False)
        return list(y.split([len(layer.weight) for layer in own], -1))

    def extra_repr(self) -> str:
        """Return the sizes, in the format of `torch.nn.Linear`."""
        return f"in_features={self.weight.shape[1]}, out_features={len(self.weight)}"


class Int8Embedding(Int8Weight):
    """Token vectors in int8; looked-up rows are converted to float."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of the table: [...] -> [..., I]."""
        return self.weight[ids].to(self.scale.dtype) * self.scale[ids].unsqueeze(-1)

    def extra_repr(self) -> str:
        """Return the sizes, in the format of `torch.nn.Embedding`."""
        return ", ".join(map(str, self.weight.shape))


def matrix_product(x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
    """Return x [..., I] times a weight [O, I] of either kind, plus bias [O]: [..., O]."""
    return weight.product(x, bias) if isinstance(weight, Int8Weight) else linear(x, weight, bias)


def as_matrix(weight: Tensor | Int8Weight) -> Tensor:
    """Return a weight [O, I] of either kind in floating point."""
    return weight.dequantized() if isinstance(weight, Int8Weight) else weight


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight [O, I] of a table or linear layer of either kind, in floating point."""
    return layer.dequantized() if isinstance(layer, Int8Weight) else layer.get_parameter("weight")


def _is_watched(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
