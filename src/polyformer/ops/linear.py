"""The linear layer, through oneDNN on a CPU in float32: about twice BLAS's speed where BLAS is tuned for
another maker's processor, and for the few rows of decoding, where reading the weights is all the work.
"""

import contextvars
import copy
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

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

PACKED_LIMIT = 2 << 30
"""Bytes of packed copies that one `PackedWeights` makes at most."""

_packed: contextvars.ContextVar["PackedWeights | None"] = contextvars.ContextVar(
    "packed_weights", default=None
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]."""
    packed = None if torch.compiler.is_compiling() else _packed.get()
    if packed is not None and not torch.is_grad_enabled():
        return packed.linear(x, weight, bias)
    if not onednn_takes(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias)
    return _onednn(x, weight, bias)


def linears(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """What several layers make of the same x; inside `PackedWeights` in one product."""
    packed = None if torch.compiler.is_compiling() else _packed.get()
    if packed is None or torch.is_grad_enabled():
        return [layer(x) for layer in layers]
    return packed.linears(x, layers)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a [N, O] transposed times b [N, I], the gradient of a weight: [O, I]."""
    if not onednn_takes(a.T, b.T):
        return a.T @ b
    return linear(_padded(a).T, _padded(b).T)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.flatten(0, -2)
    y = torch.ops.mkldnn._linear_pointwise(_padded(rows), weight, bias, "none", [], "")
    return _shaped(y[: len(rows)], x)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `_onednn`, with less ado where x has few rows."""
    rows = x.numel() // x.shape[-1]
    if rows > ROW_STEP:
        return _onednn(x, weight, bias)
    y = torch.ops.mkldnn._linear_pointwise(x.reshape(rows, x.shape[-1]), weight, bias, "none", [], "")
    return _shaped(y, x)


def _shaped(rows: Tensor, x: Tensor) -> Tensor:
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


class PackedWeights:
    """Copies of weights in oneDNN's own order of memory, which it reads up to twice as fast for few rows.

    `with packed:` every product outside autograd goes the way that the first one of its weight was found to
    go, without looking again: for a loop of small products of one dtype on one device, such as decoding. With
    `copying`, products of several rows read a copy of their weight, made when first asked for, and layers
    that read the same input (`linears`) a copy of all their weights. A copy costs its weight's memory and
    about twenty products' time. Whoever holds this object holds the copies; the weights must not change
    meanwhile.
    """

    def __init__(self, limit: int = PACKED_LIMIT):
        self.copies: dict[Tensor, Tensor] = {}
        self.room = limit
        self.copying = True
        self.joints: dict[int, _Joint | None] = {}  # by id of the first layer
        self.ways: dict[int, Tensor | None] = {}  # by id: what oneDNN reads, None for BLAS

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the function `linear`."""
        if not x.numel():  # tells nothing of the inputs to come: an expert that no token chose
            return F.linear(x, weight, bias)
        key = id(weight)
        if key in self.ways:
            read = self.ways[key]
        else:
            read = weight if onednn_takes(x, weight) else None
            if isinstance(weight, nn.Parameter):  # others may be gone, and their ids somebody else's
                self.ways[key] = read
        if read is None:
            return F.linear(x, weight, bias)
        if read is weight and self.copying and x.numel() > x.shape[-1] and key in self.ways:
            read = self.ways[key] = self.copy(weight, x)
        return _few_rows(x, read, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """As the function `linears`; once copies are made, of all weights in one."""
        if not x.numel():
            return [layer(x) for layer in layers]
        key = id(layers[0])
        if self.copying and key not in self.joints:
            self.joints[key] = self._joint(x, layers)
        joint = self.joints.get(key)
        if joint is None:
            return [layer(x) for layer in layers]
        return list(_few_rows(x, joint.weight, joint.bias).split(joint.sizes, -1))

    def _joint(self, x: Tensor, layers: Sequence[nn.Module]) -> "_Joint | None":
        """The layers as one; None where somebody watches them, or for products that are not oneDNN's."""
        plain = [
            layer
            for layer in layers
            if type(layer) is Linear and not layer._forward_hooks | layer._forward_pre_hooks
        ]
        size = sum(layer.weight.nbytes for layer in plain)
        if len(plain) < len(layers) or size > self.room or not onednn_takes(x, plain[0].weight):
            return None
        self.room -= size
        weight = torch.cat([layer.weight for layer in plain])
        if x.numel() > x.shape[-1]:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, x.numel() // x.shape[-1])
        sizes = [layer.out_features for layer in plain]
        biases = [x.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in plain]
        bias = None if all(layer.bias is None for layer in plain) else torch.cat(biases)
        return _Joint(weight, bias, sizes)

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Joint:
    """Layers one below the other, of so many rows each."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]


class _Linear(torch.autograd.Function):
    """The same product with its two gradients, each a product of the same sort."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y = x weight^T + bias."""
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

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
