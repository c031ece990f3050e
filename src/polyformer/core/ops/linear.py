"""The linear layer, computed by the library that is fastest on this processor (`product_kernels`)."""

import contextvars
import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from polyformer.core.errors import caution
from polyformer.core.ops import product_kernels
from polyformer.core.ops.autograd import autocast_disabled, without_autocast
from polyformer.core.ops.layers import ACTIVATIONS
from polyformer.core.ops.product_kernels import (
    BLAS,
    PLAIN,
    PRODUCTS,
    LayerKernels,
    onednn_product,
    onednn_takes,
)
from polyformer.core.parts import parameter, unbound

M = TypeVar("M", bound=nn.Module)

SMALL = 1 << 20
"""Up to this number of multiplications, choosing a library costs more than it saves: either takes about 10
microseconds.
"""


class LinearBackend:
    """Products outside autograd in a `with`: `models.generation.packed_weights`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the same as the function `linear`."""
        raise NotImplementedError

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Compute the same as the function `linears`."""
        raise NotImplementedError

    def activated(self, x: Tensor, layer: nn.Module, activation: str) -> Tensor:
        """Compute the same as the function `activated`."""
        raise NotImplementedError

    def __enter__(self) -> None:
        self.token = active_backend.set(self)

    def __exit__(self, *error: object) -> None:
        active_backend.reset(self.token)


active_backend: contextvars.ContextVar[LinearBackend | None] = contextvars.ContextVar("reader", default=None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]."""
    if torch.compiler.is_compiling():  # a graph serves all sizes
        return F.linear(x, weight, bias)
    other = active_backend.get()
    if other is not None and not torch.is_grad_enabled():
        return other.linear(x, weight, bias)
    if x.numel() * weight.shape[0] <= SMALL:
        return F.linear(x, weight, bias)
    return chosen_linear(x, weight, bias)


def chosen_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` eagerly, by the library that is fastest for this size."""
    if x.numel() * weight.shape[0] <= SMALL or (kernels := _kernels(x, weight)) is PLAIN:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias, kernels)
    return F.linear(x, weight, bias) if kernels.forward == BLAS else onednn_linear(x, weight, bias)


def linears(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return the outputs of several layers for one x; inside `PackedWeights` or in int8 by one product."""
    first = unbound(layers[0])
    if type(first) is not Linear:
        together = getattr(first, "together", None)
        joint = None if together is None else together(x, layers)
        if joint is not None:
            return joint
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return [layer(x) for layer in layers]
    other, kept = active_backend.get(), kept_joints.get()
    if other is not None:
        return other.linears(x, [unbound(layer) for layer in layers])
    joint = None if kept is None else kept.product(x, layers)
    if joint is None:
        return [layer(x) for layer in layers]
    return joint.split_with_sizes(
        [layer.out_features for layer in map(unbound, layers) if is_plain(layer)], -1
    )


def joint_linear(x: Tensor, layers: Sequence[nn.Module]) -> Tensor | None:
    """Return the outputs of several small layers for one x side by side, [..., O_1 + O_2 + ...].

    They are a single product of a copy of the weights, which takes less time than further calls do. Returns
    None for layers that are large, or not plain, or compiled, or where `linears` does it better.
    """
    if torch.compiler.is_compiling():
        return None
    if not torch.is_grad_enabled():
        if (kept := kept_joints.get()) is not None:
            return kept.product(x, layers)
        if active_backend.get() is not None:
            return None
    tables = _small_tables(layers)
    return None if tables is None else _product_of_copies(x, tables)


def joined(layers: Sequence[nn.Module]) -> Callable[[Tensor], Tensor] | None:
    """Return `joint_linear` as a function of x, for small plain layers; None for other layers.

    Nothing may watch or replace the layers as long as it is used: see `core.parts`.
    """
    tables = _small_tables(layers)
    if tables is None:
        return None

    def product(x: Tensor) -> Tensor:
        kept = None if torch.is_grad_enabled() else kept_joints.get()
        joint = None if kept is None else kept.joint(layers)
        return _product_of_copies(x, tables) if joint is None else F.linear(x, *joint)

    return product


def _small_tables(layers: Sequence[nn.Module]) -> list[Any] | None:
    """Return the parameters of small plain layers, all with a bias or all without; None for other layers."""
    tables: list[Any] = []
    for layer in map(unbound, layers):
        if not is_plain(layer):
            return None
        weight = layer._parameters.get("weight")
        if type(weight) is not nn.Parameter or weight.numel() > COPIED:  # pruned, parametrized, spread
            return None
        tables.append(layer._parameters)
    return tables if len({table.get("bias") is None for table in tables}) == 1 else None


def _product_of_copies(x: Tensor, tables: Sequence[Any]) -> Tensor:
    """Return x times the weights side by side, which are copied."""
    weight = torch.cat([table["weight"] for table in tables])
    with_bias = tables[0].get("bias") is not None
    return F.linear(x, weight, torch.cat([table["bias"] for table in tables]) if with_bias else None)


def activated(x: Tensor, layer: nn.Module, activation: str) -> Tensor:
    """Return the activation, given by name, of layer(x); inside `PackedWeights` in one step."""
    other = None if torch.compiler.is_compiling() else active_backend.get()
    if other is None or torch.is_grad_enabled():
        return ACTIVATIONS[activation](layer(x))
    return other.activated(x, unbound(layer), activation)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return grad [N, O] times weight [O, I], the gradient of a layer's input: [N, I]; not differentiable."""
    if not onednn_takes(grad, weight):
        return grad @ weight
    kernels = PRODUCTS().layer_kernels(len(grad) * weight.shape[1], *weight.shape)
    return product_kernels.grad_input(grad, weight, kernels.grad_input)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad [N, O] transposed times x [N, I], a weight's gradient [O, I]; not differentiable."""
    if not onednn_takes(grad, x):
        return grad.T @ x
    kernels = PRODUCTS().layer_kernels(x.numel(), grad.shape[1], x.shape[1])
    return product_kernels.grad_weight(grad, x, kernels.grad_weight)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` with oneDNN, outside autograd; see `onednn_takes`."""
    return shaped(onednn_product(x.reshape(-1, x.shape[-1]), weight, bias), x)


def shaped(rows: Tensor, x: Tensor) -> Tensor:
    """Return rows [N, O] in the leading shape of x [..., I].

    Not a view for autograd: a view returned from a custom function must not be changed in place, and nothing
    else refers to these rows.
    """
    return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN may compute this product and is the faster library for it."""
    return _kernels(x, weight).forward != BLAS


def _kernels(x: Tensor, weight: Tensor) -> LayerKernels:
    if x.numel() * weight.shape[0] <= SMALL or not onednn_takes(x, weight):
        return PLAIN
    kernels = PRODUCTS().layer_kernels(x.numel(), *weight.shape)
    return PLAIN if kernels == PLAIN else kernels


class _Linear(torch.autograd.Function):
    """The same product with its two gradients, each by the library that is fastest for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: LayerKernels) -> Tensor:
        """Return y = x weight^T + bias."""
        ctx.save_for_backward(x, weight)
        ctx.kernels = kernels
        return shaped(product_kernels.forward(x.reshape(-1, x.shape[-1]), weight, bias, kernels.forward), x)

    @staticmethod
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return grad_x = grad weight, grad_weight = sum_rows grad^T x and grad_bias = sum_rows grad."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        kernels: LayerKernels = (
            PLAIN if torch.is_grad_enabled() else ctx.kernels
        )  # oneDNN's are not differentiable
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            product_kernels.grad_input(rows, weight, kernels.grad_input).view_as(x) if for_x else None,
            product_kernels.grad_weight(rows, inputs, kernels.grad_weight) if for_weight else None,
            rows.sum(0) if for_bias else None,
            None,
        )


class Linear(nn.Linear):
    """`torch.nn.Linear` computed by the function `linear`."""

    weight: Tensor = parameter()
    bias: Tensor = parameter()

    def forward(self, input: Tensor) -> Tensor:
        """Return y = input weight^T + bias: [..., in_features] -> [..., out_features]."""
        own: Any = self._parameters
        try:
            return linear(input, own["weight"], own["bias"])
        except KeyError:  # pruned or parametrized
            return linear(input, self.weight, self.bias)

    def plain_function(self) -> Callable[[Tensor], Tensor]:
        """Return `forward` for inputs of few rows, which torch computes."""
        own: Any = self._parameters
        if type(self) is not Linear:
            return self.forward

        def product(x: Tensor) -> Tensor:
            try:
                return F.linear(x, own["weight"], own["bias"])
            except KeyError:  # pruned or parametrized
                return self.forward(x)

        return product

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig" and value is None:  # set by torch.ao.quantization on modules that it skips
            caution(
                "polyformer's Linear is not quantised as a torch.nn.Linear, of which it is a subclass; "
                "quantise polyformer.nn.as_torch(model)"
            )
        super().__setattr__(name, value)  # type: ignore[arg-type]


def is_plain(layer: nn.Module) -> TypeGuard[Linear]:
    """Return whether the layer is this module's `Linear`, and a call runs only the `forward` of its class."""
    return type(layer) is Linear and not (
        "forward" in layer.__dict__  # replaced in this module, as accelerate does to load offloaded weights
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or _has_any_global_hook()
    )


COPIED = 1 << 13
"""The largest weight that is copied into a joint product at every call."""

JOINED = 1 << 16
"""The largest weight in a joint product: a larger one is read from memory, which takes longer than a call."""


Joint = tuple[Tensor, Tensor | None]
"""The weight and the bias of several layers."""


class JointProducts:
    """A loop of small products whose weights do not change, such as decoding: use it as a context.

    Small layers that read the same input are one product inside (`joint_linear`, `linears`), of a copy of
    their weights that lives as long as this object: three small products take three times as long as one.
    """

    def __init__(self) -> None:
        self.joints: dict[int, Joint | None] = {}  # by id of the first layer

    def product(self, x: Tensor, layers: Sequence[nn.Module]) -> Tensor | None:
        """Return the outputs of the layers side by side; None for layers that are large or not plain."""
        joint = self.joint(layers)
        return None if joint is None else chosen_linear(x, *joint)

    def joint(self, layers: Sequence[nn.Module]) -> Joint | None:
        """Return the joint weight and bias of the layers; None for layers that are large or not plain."""
        key = id(unbound(layers[0]))
        if key not in self.joints:
            self.joints[key] = _joint([unbound(layer) for layer in layers])
        return self.joints[key]

    def __enter__(self) -> None:
        self.token = kept_joints.set(self)

    def __exit__(self, *error: object) -> None:
        kept_joints.reset(self.token)


kept_joints: contextvars.ContextVar[JointProducts | None] = contextvars.ContextVar("joints", default=None)


def _joint(layers: Sequence[nn.Module]) -> Joint | None:
    """Return the joint weight of small plain layers; None for other layers."""
    plain = [layer for layer in layers if is_plain(layer) and layer.weight.numel() <= JOINED]
    if len(plain) < len(layers) or len({layer.weight.dtype for layer in plain}) > 1:
        return None
    sizes = [layer.out_features for layer in plain]
    weight = torch.cat([layer.weight.detach() for layer in plain])
    return weight, stacked_bias([layer.bias for layer in plain], sizes)


class WideLinear(Linear):
    """A linear layer that computes and returns float32 for inputs in float16, whose range its outputs exceed.

    The weights keep their type. bfloat16 has the range of float32, so it is computed as in `Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return y = input weight^T + bias: [..., in_features] -> [..., out_features]."""
        if input.dtype != torch.float16:
            return super().forward(input)
        with without_autocast(input):
            bias = None if self.bias is None else self.bias.float()
            return linear(input.float(), self.weight.float(), bias)


class ExactLinear(Linear):
    """A linear layer that stays in floating point in a quantized model: few numbers with a large effect."""


def as_torch(model: M) -> M:
    """Return a copy of the model with `torch.nn.Linear` as linear layers, which some tools require."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if type(module) in (Linear, ExactLinear, WideLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return copied


def stacked_bias(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Return the biases of stacked layers with these numbers of outputs as one; None if no layer has one."""
    known = [bias for bias in biases if bias is not None]
    if not known:
        return None
    parts = [known[0].new_zeros(size) if bias is None else bias.detach() for bias, size in zip(biases, sizes)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
