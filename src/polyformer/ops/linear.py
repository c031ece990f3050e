"""The linear layer, whose products go to the library that is fastest on this processor (`product_ways`)."""

import contextvars
import copy
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.ops import product_ways
from polyformer.ops.activations import ACTIVATIONS
from polyformer.ops.precision import as_written
from polyformer.ops.product_ways import BLAS, PLAIN, PRODUCTS, Ways, onednn_product

M = TypeVar("M", bound=nn.Module)

ONEDNN_BUILT = torch.backends.mkldnn.is_available()

SMALL = 1 << 20
"""Multiplications that take either library some ten microseconds: choosing would cost more than it gains."""


class Reader(Protocol):
    """Who computes products outside autograd instead, while it is set: `polyformer.ops.packed_weights`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the function `linear`."""
        ...

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
        """As the function `linears`."""
        ...

    def activated(self, x: Tensor, layer: nn.Module, activation: str) -> Tensor:
        """As the function `activated`."""
        ...


reader: contextvars.ContextVar[Reader | None] = contextvars.ContextVar("reader", default=None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]."""
    if torch.compiler.is_compiling():  # whose graphs are for all sizes
        return F.linear(x, weight, bias)
    other = reader.get()
    if other is not None and not torch.is_grad_enabled():
        return other.linear(x, weight, bias)
    ways = _ways(x, weight)
    if ways == PLAIN:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias, ways)
    return F.linear(x, weight, bias) if ways.forward == BLAS else onednn_linear(x, weight, bias)


def linears(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """What several layers make of the same x; in one product inside `PackedWeights` or for int8."""
    together = getattr(layers[0], "together", None)
    joint = None if together is None else together(x, layers)
    if joint is not None:
        return joint
    other = None if torch.compiler.is_compiling() else reader.get()
    if other is None or torch.is_grad_enabled():
        return [layer(x) for layer in layers]
    return other.linears(x, layers)


def activated(x: Tensor, layer: nn.Module, activation: str) -> Tensor:
    """What an activation, by its name, makes of layer(x); inside `PackedWeights` in one step."""
    other = None if torch.compiler.is_compiling() else reader.get()
    if other is None or torch.is_grad_enabled():
        return ACTIVATIONS[activation](layer(x))
    return other.activated(x, layer, activation)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [N, O] times weight [O, I], the gradient of a layer's input: [N, I]; not differentiated."""
    if not onednn_takes(grad, weight):
        return grad @ weight
    ways = PRODUCTS().ways(len(grad), weight.shape[1], weight.shape[0])
    return product_ways.grad_input(grad, weight, ways.grad_input)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad [N, O] transposed times x [N, I], the gradient of a layer's weight: [O, I]; not differentiated."""
    if not onednn_takes(grad, x):
        return grad.T @ x
    return product_ways.grad_weight(grad, x, PRODUCTS().ways(len(x), x.shape[1], grad.shape[1]).grad_weight)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` by oneDNN, outside autograd; see `onednn_takes`."""
    return shaped(onednn_product(x.reshape(-1, x.shape[-1]), weight, bias), x)


def shaped(rows: Tensor, x: Tensor) -> Tensor:
    """[N, O] as x [..., I] lies. Not a view for autograd: what a custom function returns as a view may not be
    changed in place, and nobody else has these rows."""
    return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])


def onednn_takes(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether this product of `dtype` may go to oneDNN: eager, on a CPU, outside autocast and torch.func."""
    return (
        x.dtype == weight.dtype == dtype
        and x.is_cpu
        and weight.is_cpu
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # torch.jit.trace cannot write these operations down
        and ONEDNN_BUILT
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and x.numel() > 0
    )


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is the faster library for this product, and may compute it."""
    return _ways(x, weight).forward != BLAS


def _ways(x: Tensor, weight: Tensor) -> Ways:
    if x.numel() * weight.shape[0] <= SMALL or not onednn_takes(x, weight):
        return PLAIN
    return PRODUCTS().layer_ways(x, weight)


class _Linear(torch.autograd.Function):
    """The same product with its two gradients, each computed in its own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ways: Ways) -> Tensor:
        """y = x weight^T + bias."""
        ctx.save_for_backward(x, weight)
        ctx.ways = ways
        return shaped(product_ways.forward(x.reshape(-1, x.shape[-1]), weight, bias, ways.forward), x)

    @staticmethod
    @as_written
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad_x = grad weight; grad_weight = sum_rows grad^T x; grad_bias = sum_rows grad."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        ways: Ways = PLAIN if torch.is_grad_enabled() else ctx.ways  # oneDNN's products have no gradient
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            product_ways.grad_input(rows, weight, ways.grad_input).view_as(x) if for_x else None,
            product_ways.grad_weight(rows, inputs, ways.grad_weight) if for_weight else None,
            rows.sum(0) if for_bias else None,
            None,
        )


class Linear(nn.Linear):
    """`torch.nn.Linear` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """y = input weight^T + bias: [..., in_features] -> [..., out_features]."""
        return linear(input, self.weight, self.bias)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig" and value is None:  # how torch.ao.quantization marks what it leaves as it is
            warnings.warn(
                "polyformer's Linear is not quantised as a torch.nn.Linear, of which it is a subclass; "
                "quantise polyformer.ops.linear.as_torch(model)",
                stacklevel=2,
            )
        super().__setattr__(name, value)  # type: ignore[arg-type]


def is_plain(layer: nn.Module) -> TypeGuard[Linear]:
    """Whether the layer is our own, and nobody watches it."""
    return type(layer) is Linear and not layer._forward_hooks and not layer._forward_pre_hooks


class ExactLinear(Linear):
    """One that stays in floating point where a model's weights become int8: few numbers that decide much."""


def as_torch(model: M) -> M:
    """A copy of the model whose linear layers are `torch.nn.Linear`, for tools that ask for this type."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if type(module) in (Linear, ExactLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return copied
