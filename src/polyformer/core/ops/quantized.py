"""Quantized weights of any kind: products, and the base classes of modules."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.ops.linear import linear
from polyformer.core.ops.tuning import core_cache


def dequantized_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the definition for a dequantized weight [O, I], on any device; gradients reach x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def chunked_product(x: Tensor, outputs: int, rows: Callable[[slice], Tensor]) -> Tensor:
    """Return x [..., I] times a weight [O, I], transposed, by float products that each fit a core's cache.

    rows: returns some rows of the weight in the type of x.
    """
    y = x.new_empty(*x.shape[:-1], outputs)
    step = max(64, 4 * core_cache() // (x.element_size() * x.shape[-1]))
    for start in range(0, outputs, step):
        part = slice(start, min(start + step, outputs))
        y[..., part] = linear(x, rows(part))
    return y


def has_fast_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether faster methods than the definition apply: eager on a CPU, outside autograd, autocast."""
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and torch._C._get_tracing_state() is None
        and is_plain_call(x)
        and x.numel() > 0
        and weight.numel() > 0
    )


def is_plain_call(x: Tensor) -> bool:
    """Return whether a call with x is eager, outside autograd, autocast and torch.func."""
    return (
        not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
    )


class StackedProduct(Protocol):
    """Weights with the same input, stacked, in the formats of fast methods, with their biases."""

    def product(self, x: Tensor, exact: bool) -> Tensor:
        """Return x [..., I] times the weights, plus the biases: [..., O]. exact: never in bfloat16."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedLayers:
    """Stacked layers, and the tensors that they were built from."""

    stacked: Any
    sources: list[Tensor]
    versions: list[int]

    def is_of(self, sources: Sequence[Tensor]) -> bool:
        """Return whether the tensors are the sources of this object, unchanged."""
        return len(sources) == len(self.sources) and all(
            tensor is own and _version(tensor) == version
            for tensor, own, version in zip(sources, self.sources, self.versions)
        )


class QuantizedWeight(nn.Module):
    """A weight [O, I] that is not in floating point; its numbers are buffers.

    joined: the formats of the fast methods, by the number of layers that share them; built when needed and
    not part of the module's state.
    """

    weight: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        self.outputs, self.inputs = weight.shape
        self.joined: dict[int, JoinedLayers] = {}

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in floating point."""
        raise NotImplementedError

    def stacked(self, layers: Sequence[Any], biases: Sequence[Tensor | None]) -> StackedProduct:
        """Return layers of this class in the formats of the fast methods."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None = None, exact: bool = True) -> Tensor:
        """Return x [..., I] times the weight transposed, plus bias [O]: [..., O]. exact: not in bfloat16."""
        if not has_fast_product(x, self.weight):
            return self.simple_product(x, bias)
        return self.join([self], [bias]).product(x, exact)

    def simple_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `product` without the fast methods of a CPU."""
        return dequantized_product(x, self.dequantized(), bias)

    def join(self, layers: "Sequence[QuantizedWeight]", biases: Sequence[Tensor | None]) -> Any:
        """Return the weights of `layers`, beginning with this one, in the formats of the fast methods."""
        sources = [tensor for layer in layers for tensor in layer._buffers.values() if tensor is not None]
        sources += [bias for bias in biases if bias is not None]
        joined = self.joined.get(len(layers))
        if joined is None or not joined.is_of(sources):
            versions = [_version(tensor) for tensor in sources]
            joined = JoinedLayers(self.stacked(layers, biases), sources, versions)
            self.joined[len(layers)] = joined
        return joined.stacked

    def extra_repr(self) -> str:
        """Return the sizes, in the format of `torch.nn.Embedding`."""
        return f"{self.outputs}, {self.inputs}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "joined": {}}

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        self.joined = {}
        return super()._apply(*arguments, **options)


class QuantizedLinear(QuantizedWeight):
    """A `Linear` with a quantized weight; the bias is not quantized."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(weight)
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Return y = x weight^T + bias: [..., I] -> [..., O]."""
        return self.product(x, self.bias, exact=False)

    def together(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor] | None:
        """Return the outputs of layers for the same x, from one product; None if they must run separately."""
        own = [
            layer
            for layer in layers
            if isinstance(layer, QuantizedLinear) and type(layer) is type(self) and not _is_watched(layer)
        ]
        if len(own) < len(layers) or not has_fast_product(x, self.weight):
            return None
        y = self.join(own, [layer.bias for layer in own]).product(x, exact=False)
        return list(y.split([layer.outputs for layer in own], -1))

    def extra_repr(self) -> str:
        """Return the sizes, in the format of `torch.nn.Linear`."""
        return f"in_features={self.inputs}, out_features={self.outputs}"


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight [O, I] of a table or linear layer of any kind, in floating point."""
    return layer.dequantized() if isinstance(layer, QuantizedWeight) else layer.get_parameter("weight")


def _is_watched(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
