"""Products with int8 weights, which are read four times as fast as float32: y = x W^T + b,

    W_oi = scale_o w_oi,    w in -127 .. 127,    scale_o = max_i |W_oi| / 127

with one scale per output channel; only weights are rounded. `dequantized_product` is the definition. CPUs
have three more methods, and the fastest for each number of rows is measured. GPUs have `gpu_product`. In none
does a row depend on another.

`bfloat16_product`: x and y rounded to bfloat16, sums in float32; not for logits, whose differences matter.
`integer_product`, with torch's FBGEMM (x86 with AVX2): a row x with m = max |x_i| is approximated by

    m / 63 (hi + lo / 126),    hi, lo in -63 .. 63,

with an error of at most m / 15876; the two integer products are exact. Seven bits each, because AVX2 adds
pairs of products in 16 bits. `chunked_product`: float products with a few rows of W each, for a prompt.
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops.linear import linear
from polyformer.core.ops.tuning import Section
from polyformer.core.ops.tuning.machine import core_cache
from polyformer.core.ops.tuning.stopwatch import cache_emptier, least_seconds

LEVELS = 127
"""The largest integer of a weight; the least is its negative."""

HIGH, LOW = 63, 126
"""The largest integer of the high part of an activation, and the number of steps of the low part per step."""

WIDEST = 1 << 16
"""The most inputs of a product in integers: a longer sum could overflow 32 bits."""

VECTOR = 32
"""Inputs that torch's product in bfloat16 reads together, even beyond the end of shorter inputs."""

ROWS = 1, 4, 8, 16, 32, 64, 128, 256, 512
"""Numbers of rows for which the methods are compared."""

FEW = 8
"""The most rows for which a weight is measured as read from memory."""

ENGINES = "x86", "fbgemm"
"""The FBGEMM engines among torch's quantized engines."""


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers [O, I] and the scales [O], in the weight's dtype, of a weight [O, I].

    A scale is rounded up to the eight bits of a bfloat16, so that it stays the same in every floating type.
    Raises `InputError` if a number is not finite.
    """
    weight = weight.detach()
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    largest = exact.abs().amax(1) if exact.shape[1] else exact.new_zeros(len(exact))
    if not weight.is_meta and not bool(largest.isfinite().all()):
        raise InputError("weights: contain NaN or infinity, so they cannot become int8; the model is damaged")
    bits = (largest / LEVELS).float().view(torch.int32)
    scale = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(exact.dtype)
    steps = (exact / scale.where(scale > 0, 1).unsqueeze(1)).round()
    return steps.clamp(-LEVELS, LEVELS).to(torch.int8), scale.to(weight.dtype)


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the weight [O, I] for integers [O, I] and scales [O]."""
    return weight.to(scale.dtype) * scale.unsqueeze(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Config(Config):
    """The most rows that are computed in bfloat16, and the most rows that are computed in integers."""

    halves: int = 1
    integers: int = 64


class StackedWeights:
    """Weights with the same input, stacked, in the formats of the fast methods.

    Args:
        weights: integers [O, I] each. scales: [O] each. biases: [O] each or None.
    """

    def __init__(self, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor | None]):
        known = [bias for bias in biases if bias is not None]
        self.sources = [*weights, *scales, *known]
        self.versions = [_version(tensor) for tensor in self.sources]
        self.weight, self.scale = _cat(weights), _cat(scales)
        self.halves = self.scale.to(torch.bfloat16)
        self.bias = None
        if known:
            zeros = [scale.new_zeros(scale.shape) for scale in scales]
            self.bias = _cat([zero if bias is None else bias.detach() for bias, zero in zip(biases, zeros)])

    def is_of(self, sources: Sequence[Tensor]) -> bool:
        """Return whether the tensors are the sources of this object, unchanged."""
        for tensor, own, version in zip(sources, self.sources, self.versions, strict=True):
            if tensor is not own or _version(tensor) != version:
                return False
        return True

    @functools.cached_property
    def packed(self) -> Any:
        """The weights in FBGEMM's format."""
        with (
            warnings.catch_warnings()
        ):  # torch deprecates these tensors; `has_integer_product` checks that they exist
            warnings.simplefilter("ignore", UserWarning)
            scale, zeros = self.scale.double() / HIGH, torch.zeros(len(self.weight), dtype=torch.int64)
            tensor = torch._make_per_channel_quantized_tensor(self.weight, scale, zeros, 0)  # type: ignore[attr-defined]
            return torch.ops.quantized.linear_prepack(tensor, None)


def product(x: Tensor, joined: StackedWeights, exact: bool) -> Tensor:
    """Return x [..., I] times the weights, plus the bias: [..., O]; exact: not in bfloat16."""
    rows = x.numel() // x.shape[-1]
    config = SECTION()
    if rows <= config.halves and not exact and x.shape[-1] % VECTOR == 0:
        return bfloat16_product(x, joined)
    if rows <= config.integers and x.shape[-1] <= WIDEST and has_integer_product():
        return integer_product(x, joined)
    return chunked_product(x, joined)


def bfloat16_product(x: Tensor, joined: StackedWeights) -> Tensor:
    """Compute with torch's product of bfloat16 with int8."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    y = torch.ops.aten._weight_int8pack_mm(rows, joined.weight, joined.halves).view(*x.shape[:-1], -1)
    return (y if joined.bias is None else torch.add(y, joined.bias)).to(x.dtype)


def integer_product(x: Tensor, joined: StackedWeights) -> Tensor:
    """Compute with FBGEMM's exact products of integers."""
    rows = x.reshape(-1, x.shape[-1]).float()
    largest = rows.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    steps = (rows / largest).mul_(HIGH)
    high = steps.round()
    both = torch.cat([high, steps.sub_(high).mul_(LOW)])
    y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(both, 1.0, HIGH + 1, joined.packed)
    y = torch.add(y[: len(rows)], y[len(rows) :], alpha=1 / LOW)
    y = y.mul_(largest) if joined.bias is None else torch.addcmul(joined.bias.float(), y, largest)
    return y.view(*x.shape[:-1], -1).to(x.dtype)


def chunked_product(x: Tensor, joined: StackedWeights) -> Tensor:
    """Compute with float products, each with the rows of W that fit into a core's cache."""
    weight = joined.weight
    y = x.new_empty(*x.shape[:-1], len(weight))
    step = max(64, 4 * core_cache() // (x.element_size() * weight.shape[1]))
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        y[..., part] = linear(x, weight[part].to(x.dtype))
    y *= joined.scale
    return y if joined.bias is None else y.add_(joined.bias)


def dequantized_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the definition, on any device; gradients reach x."""
    return F.linear(x, dequantized(weight, scale).to(x.dtype), None if bias is None else bias.to(x.dtype))


def gpu_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute with the integers, exact in the type of x, and multiply the sums, in float32, by the scales.

    The definition would write and read the weight three times more, in float32.
    """
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.to(x.dtype).T
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        y = torch.mm(rows, matrix, out_dtype=torch.float32)
    else:
        y = rows @ matrix
    y = y.mul_(scale) if bias is None else torch.addcmul(bias.to(y.dtype), y, scale)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def has_gpu_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether `gpu_product` applies: eager on a GPU, outside autograd and autocast."""
    return x.is_cuda and weight.is_cuda and _is_plain(x)


def has_fast_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether a faster method applies: eager on a CPU, outside autograd and autocast."""
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and torch._C._get_tracing_state() is None
        and _is_plain(x)
        and x.numel() > 0
        and weight.numel() > 0
    )


def _is_plain(x: Tensor) -> bool:
    """Return whether a call with x is eager, outside autograd, autocast and torch.func."""
    return (
        not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
    )


def has_integer_product() -> bool:
    """Return whether torch has the integer products, and the current engine can pack for them."""
    return torch.backends.quantized.engine in ENGINES and _can_multiply_integers()


@functools.cache
def _can_multiply_integers() -> bool:
    try:
        y = integer_product(torch.ones(1, 8), _ones(1, 8))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((y == 8).all())


def _ones(outputs: int, inputs: int) -> StackedWeights:
    return StackedWeights([torch.ones(outputs, inputs, dtype=torch.int8)], [torch.ones(outputs)], [None])


def _measure() -> Int8Config:
    """Return the fastest method for each number of rows; for a few rows the weight is read from memory.

    A few rows take as long as reading the weight, and every weight of a model has left the caches when a loop
    returns to it. (Float products read four times as much, so they are not tried.) More rows take as long as
    the multiplications.
    """
    joined = _ones(4096, 1024)
    methods = [bfloat16_product, *([integer_product] if has_integer_product() else []), chunked_product]
    most = dict.fromkeys(methods, 0)
    empty_caches = cache_emptier()
    for rows in ROWS:
        x = torch.ones(rows, 1024)
        calls = {
            method: functools.partial(method, x, joined)
            for method in (methods if rows > FEW else methods[:-1])
        }
        times = least_seconds(calls, 3, before=empty_caches if rows <= FEW else None)
        best = min(calls, key=lambda method: times[method])
        methods = methods[methods.index(best) :]
        if best is chunked_product:
            break
        most[best] = rows
    return Int8Config(
        halves=most[bfloat16_product], integers=max(most.values()) if has_integer_product() else 0
    )


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


SECTION = Section("int8 products", fixed=Int8Config(), measure=_measure)
