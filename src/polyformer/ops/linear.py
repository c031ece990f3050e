"""The linear layer, through oneDNN on a CPU in float32: about twice BLAS's speed where BLAS is tuned for
another maker's processor, and for the few rows of decoding, where reading the weights is all the work.
"""

import contextvars
import copy
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from polyformer.ops.precision import as_written

M = TypeVar("M", bound=nn.Module)

SMALL_WEIGHT, FEW_ROWS = 1 << 16, 16
"""A product this small is over before oneDNN, some 10 microseconds a call, has begun."""

ROW_STEP = 64
"""Longer inputs are padded to a multiple of so many rows: oneDNN compiles and keeps a kernel, about a
megabyte, for every shape it meets, and batches of text come in hundreds of lengths."""


class Reader(Protocol):
    """Who computes products outside autograd instead, while it is set: `polyformer.ops.packed_weights`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the function `linear`."""
        ...

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """As the function `linears`."""
        ...


reader: contextvars.ContextVar[Reader | None] = contextvars.ContextVar("reader", default=None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]."""
    other = None if torch.compiler.is_compiling() else reader.get()
    if other is not None and not torch.is_grad_enabled():
        return other.linear(x, weight, bias)
    if not onednn_takes(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias)
    return onednn_linear(x, weight, bias)


def linears(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """What several layers make of the same x; inside `PackedWeights` in one product."""
    other = None if torch.compiler.is_compiling() else reader.get()
    if other is None or torch.is_grad_enabled():
        return [layer(x) for layer in layers]
    return other.linears(x, layers)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a [N, O] transposed times b [N, I], the gradient of a weight: [O, I]."""
    if not onednn_takes(a.T, b.T):
        return a.T @ b
    return linear(_padded(a).T, _padded(b).T)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` by oneDNN, outside autograd; see `onednn_takes`."""
    rows = x.flatten(0, -2)
    y = torch.ops.mkldnn._linear_pointwise(_padded(rows), weight, bias, "none", [], "")
    return shaped(y[: len(rows)], x)


def shaped(rows: Tensor, x: Tensor) -> Tensor:
    """[N, O] as x [..., I] lies. Not a view for autograd: what a custom function returns as a view may not be
    changed in place, and nobody else has these rows."""
    return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])


def _padded(rows: Tensor) -> Tensor:
    """[N, I] with rows of zeros up to the next multiple of `ROW_STEP`; few rows stay as they are."""
    missing = -len(rows) % ROW_STEP
    return F.pad(rows, (0, 0, 0, missing)) if missing and len(rows) > ROW_STEP else rows


def onednn_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether this product may go to oneDNN: eager float32 on a CPU, outside autocast and torch.func."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # torch.jit.trace cannot write these operations down
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and x.numel() > 0
        and (weight.numel() > SMALL_WEIGHT or x.numel() > FEW_ROWS * weight.shape[1])
    )


class _Linear(torch.autograd.Function):
    """The same product with its two gradients, each a product of the same sort."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y = x weight^T + bias."""
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    @as_written
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad_x = grad weight; grad_weight = sum_rows grad^T x; grad_bias = sum_rows grad."""
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        for_x, for_weight, for_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows = grad.flatten(0, -2)
        return (
            linear(grad, weight.T) if for_x else None,
            outer(rows, x.flatten(0, -2)) if for_weight else None,
            rows.sum(0) if for_bias else None,
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


def as_torch(model: M) -> M:
    """A copy of the model whose linear layers are `torch.nn.Linear`, for tools that ask for this type."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return copied
