"""The linear layer, through oneDNN on a CPU in float32: about twice BLAS's speed where BLAS is tuned for
another maker's processor, and for the few rows of decoding, where reading the weights is all the work.
"""

import contextvars

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

SMALL_WEIGHT, FEW_ROWS = 1 << 16, 16
"""A product this small is over before oneDNN, some 10 microseconds a call, has begun."""

ROW_STEP = 64
"""Longer inputs are padded to a multiple of so many rows: oneDNN compiles and keeps a kernel, about a
megabyte, for every shape it meets, and batches of text come in hundreds of lengths."""

PACKED_LIMIT = 2 << 30
"""Bytes of packed copies that one `PackedWeights` makes at most."""

_packed: contextvars.ContextVar["PackedWeights | None"] = contextvars.ContextVar(
    "packed_weights", default=None
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]."""
    if not onednn_takes(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias)
    packed = _packed.get()
    if packed is not None and isinstance(weight, nn.Parameter):
        weight = packed.copy(weight, x)
    return _onednn(x, weight, bias)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a [N, O] transposed times b [N, I], the gradient of a weight: [O, I]."""
    if not onednn_takes(a.T, b.T):
        return a.T @ b
    return linear(_padded(a).T, _padded(b).T)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.flatten(0, -2)
    y = torch.ops.mkldnn._linear_pointwise(_padded(rows), weight, bias, "none", [], "")
    return y[: len(rows)].unflatten(0, x.shape[:-1])


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
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and x.numel() > 0
        and (weight.numel() > SMALL_WEIGHT or x.numel() > FEW_ROWS * weight.shape[1])
    )


class PackedWeights:
    """Copies of weights in oneDNN's own order of memory, which it reads up to twice as fast for few rows.

    `with packed:` every product outside autograd reads the copy of its weight, made when first asked for. A
    copy costs its weight's memory and about twenty products' time: worth it for a loop of small products,
    such as decoding. Whoever holds this object holds the copies; the weights must not change meanwhile.
    """

    def __init__(self, limit: int = PACKED_LIMIT):
        self.copies: dict[Tensor, Tensor] = {}
        self.room = limit

    def copy(self, weight: Tensor, x: Tensor) -> Tensor:
        """The copy of `weight` for inputs like `x`, or the weight itself when there is no more room."""
        if weight not in self.copies:
            if weight.nbytes > self.room:
                return weight
            self.room -= weight.nbytes
            rows = x.numel() // x.shape[-1]
            self.copies[weight] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        return self.copies[weight]

    def __enter__(self) -> None:
        self.token = _packed.set(self)

    def __exit__(self, *error: object) -> None:
        _packed.reset(self.token)


class _Linear(torch.autograd.Function):
    """The same product with its two gradients, each a product of the same sort."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
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
        return linear(input, self.weight, self.bias)
