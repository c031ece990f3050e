"""Weights of 8 bits: exact sums of integers, products, and modules.

The libraries of torch for x86 compute exact sums of integers with int8 weights:

y_no = scale_o sum_i w_oi p_ni,    w in -127 .. 127,    p in -levels .. levels

fbgemm   levels 63: with AVX2 it adds pairs of products in 16 bits
onednn   levels 127, with instructions for bytes (VNNI or AMX); without them its sums overflow

Products y = x W^T + b read int8 weights four times as fast as float32:

    W_oi = scale_o w_oi,    w in -127 .. 127,    scale_o = max_i |W_oi| / 127

with one scale per output channel; only weights are rounded. `dequantized` is the definition. CPUs
have faster methods, measured for each number of rows. GPUs have `gpu_product`. In none does a row depend on
another.

`integer_product`, with exact products of integers: a row x with m = max |x_i| is
approximated by

    m / L (high + low / 2L),    high, low in -L .. L,

with an error of at most m / 4L^2; L = 63 or 127. A single integer of 8 bits per input would be too coarse: it
raises the perplexity of SmolLM2-135M by 3 %.

`float_product`: float products with a few rows of W each, for a prompt. `bfloat16_product`, where there are
no integer products: x and y rounded to bfloat16, sums in float32; not for logits: differences matter.

The weight of a head, a linear layer and token vectors have modules.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.host_values import is_recorded
from polyformer.core.ops.linear import linear, stacked_bias
from polyformer.core.ops.product_kernels import CLEARLY
from polyformer.core.ops.quantized import QuantizedLinear, QuantizedWeight, chunked_product, is_plain_call
from polyformer.core.ops.tuning import Section, cache_emptier, least_seconds
from polyformer.core.recorded_graph import GraphObject, graph_object

LibraryName = Literal["fbgemm", "onednn"]

ENGINES = "x86", "fbgemm"
"""The FBGEMM engines among torch's quantized engines."""

PACKED_FOR = 16
"""The rows for which oneDNN chooses its layout: two parts each of eight texts."""


@dataclasses.dataclass(frozen=True, eq=False)
class PackedIntegers(GraphObject):
    """A weight [O, I] in the format of a library."""

    library: "Library"
    packed: Any
    scale: Tensor

    def product(self, high: Tensor, low: Tensor) -> Sequence[Tensor]:
        """Return y [N, O] for two p [N, I]: float32 numbers, which are integers plus the library's offset.

        low is rounded to integers.
        """
        parts = torch.cat([high, low])
        if self.library.offset:  # here, so that torch's compiler joins it with the operations before
            parts = parts.add_(0.5).to(torch.uint8)
        if is_recorded():
            y = torch.ops.polyformer.integer_product.default(parts, self.key, self.scale)
        else:
            y = self.library.multiply(parts, self.packed, self.scale)
        return y.chunk(2)


@dataclasses.dataclass(frozen=True)
class Library:
    """A library. levels: the largest integer of an input. offset: what is added to every integer.

    pack takes integers [O, I] and scales [O]; multiply takes p, the result of pack, and the scales.
    """

    levels: int
    offset: int
    pack: Callable[[Tensor, Tensor], Any]
    multiply: Callable[[Tensor, Any, Tensor], Tensor]

    @functools.cached_property
    def start(self) -> Tensor:
        """The offset as a tensor."""
        return torch.tensor(float(self.offset), device="cpu", dtype=torch.float32)

    def packed(self, weight: Tensor, scale: Tensor) -> PackedIntegers:
        """Return a weight [O, I] and its scales [O] in the library's format."""
        scale = scale.float()
        return PackedIntegers(self, self.pack(weight, scale), scale)

    @functools.cached_property
    def is_exact(self) -> bool:
        """Whether torch has the library, and no sum overflows on this processor."""
        p = self.levels * torch.tensor([[1.0], [-1.0]]).expand(2, 64)
        weight = torch.full((2, 64), 127, dtype=torch.int8)
        try:
            y, _ = self.packed(weight, torch.ones(2)).product(p + self.offset, p + self.offset)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        return torch.equal(y, p @ weight.float().T)


def _pack_fbgemm(weight: Tensor, scale: Tensor) -> Any:
    with warnings.catch_warnings():  # torch deprecates these tensors; `is_exact` checks that they exist
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        tensor = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)  # type: ignore[attr-defined]
        return torch.ops.quantized.linear_prepack(tensor, None)


def _multiply_fbgemm(parts: Tensor, packed: Any, scale: Tensor) -> Tensor:
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(parts, 1.0, 64, packed)


def _pack_onednn(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    packed = torch.ops.onednn.qlinear_prepack(weight, [PACKED_FOR, weight.shape[1]])
    return packed, torch.zeros(len(weight), dtype=torch.int64)


def _multiply_onednn(parts: Tensor, packed: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
    weight, zeros = packed
    output = None, 1.0, 0, torch.float32, "none", [], ""
    return torch.ops.onednn.qlinear_pointwise.default(parts, 1.0, 128, weight, scale, zeros, *output)


LIBRARIES: dict[LibraryName, Library] = {
    "fbgemm": Library(63, 0, _pack_fbgemm, _multiply_fbgemm),
    # Without AMX it multiplies only bytes without a sign fast.
    "onednn": Library(127, 128, _pack_onednn, _multiply_onednn),
}


def has_integer_products() -> bool:
    """Return whether FBGEMM has exact products here, and the current engine can pack for them."""
    return torch.backends.quantized.engine in ENGINES and LIBRARIES["fbgemm"].is_exact


_library = torch.library.Library("polyformer", "FRAGMENT")
_library.define("integer_product(Tensor parts, Tensor key, Tensor scale) -> Tensor")


def _integer_product(parts: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """Compute `PackedIntegers.product` in a graph."""
    weight: PackedIntegers = graph_object(key)
    return weight.library.multiply(parts, weight.packed, scale)


_library.impl("integer_product", _integer_product, "CPU")


@torch.library.register_fake("polyformer::integer_product", lib=_library)
def _(parts: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty(len(parts), len(scale))


LEVELS = 127
"""The largest integer of a weight; the least is its negative."""

WIDEST = 1 << 16
"""The most inputs of a product in integers: a longer sum could overflow 32 bits."""

VECTOR = 32
"""Inputs that torch's product in bfloat16 reads together, even beyond the end of shorter inputs."""

FEW, ROWS = 8, (16, 32, 64, 128, 256, 512)
"""The rows for which the libraries are compared, and the rows for which float products are compared too."""


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
    """The library of integer products for several rows, and the most rows in integers.

    FBGEMM multiplies a single row: its call costs 25 microseconds less than oneDNN's. Two libraries need two
    packed copies of a weight.
    """

    several: LibraryName = "fbgemm"
    integers: int = 64


class StackedWeights:
    """Weights with the same input, stacked, in the formats of the fast methods.

    Args:
        weights: integers [O, I] each. scales: [O] each. biases: [O] each or None.
    """

    def __init__(self, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor | None]):
        self.weight, self.scale = _cat(weights), _cat(scales)
        self._packed: dict[LibraryName, PackedIntegers] = {}
        self.bias = stacked_bias(biases, [*map(len, scales)])

    def product(self, x: Tensor, exact: bool) -> Tensor:
        """Return x [..., I] times the weights, plus the bias: [..., O]; exact: not in bfloat16."""
        rows = x.numel() // x.shape[-1]
        if has_integer_products():
            config = SECTION()
            if rows <= config.integers and x.shape[-1] <= WIDEST:
                library = "fbgemm" if rows == 1 else config.several
                # A resumed run may have the choices of another processor.
                return integer_product(x, self, library if LIBRARIES[library].is_exact else "fbgemm")
        elif rows == 1 and not exact and x.shape[-1] % VECTOR == 0:
            return bfloat16_product(x, self)
        return float_product(x, self)

    def packed(self, library: LibraryName) -> PackedIntegers:
        """Return the weights in the format of a library, packed when first needed."""
        if library not in self._packed:
            self._packed[library] = LIBRARIES[library].packed(self.weight, self.scale)
        return self._packed[library]


def bfloat16_product(x: Tensor, joined: StackedWeights) -> Tensor:
    """Compute with torch's product of bfloat16 with int8."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    scale = joined.scale.to(torch.bfloat16)
    y = torch.ops.aten._weight_int8pack_mm(rows, joined.weight, scale).view(*x.shape[:-1], -1)
    return (y if joined.bias is None else torch.add(y, joined.bias)).to(x.dtype)


def integer_product(x: Tensor, joined: StackedWeights, library: LibraryName) -> Tensor:
    """Compute with exact products of the two integers of every input."""
    packed = joined.packed(library)
    levels, start = packed.library.levels, packed.library.start
    rows = x.reshape(-1, x.shape[-1]).float()
    # Eager operations take most of the time of a small product, so these are few. A row of zeros becomes
    # NaN and then any integers, which are multiplied by 0.
    step = torch.linalg.vector_norm(rows, torch.inf, 1, True) / levels
    steps = torch.addcdiv(start, rows, step)
    high = steps.round()
    low = torch.add(start, steps - high, alpha=2 * levels)
    high, low = packed.product(high, low)
    y = torch.add(high, low, alpha=0.5 / levels)
    y = y.mul_(step) if joined.bias is None else torch.addcmul(joined.bias.float(), y, step)
    return y.view(*x.shape[:-1], -1).to(x.dtype)


def float_product(x: Tensor, joined: StackedWeights) -> Tensor:
    """Compute with float products, each with the rows of W that fit into a core's cache."""
    weight = joined.weight
    y = chunked_product(x, len(weight), lambda rows: weight[rows].to(x.dtype))
    y *= joined.scale
    return y if joined.bias is None else y.add_(joined.bias)


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
    return x.is_cuda and weight.is_cuda and is_plain_call(x)


def _ones(outputs: int, inputs: int) -> StackedWeights:
    return StackedWeights([torch.ones(outputs, inputs, dtype=torch.int8)], [torch.ones(outputs)], [None])


def _measure() -> Int8Config:
    """Return the faster library for a few rows, and the most rows for which it is faster than float products.

    A few rows take as long as reading the weight, and every weight of a model has left the caches when a loop
    returns to it. More rows take as long as the multiplications.
    """
    if not has_integer_products():
        return Int8Config(integers=0)
    joined = _ones(4096, 1024)
    x = torch.ones(FEW, 1024)
    calls: dict[LibraryName, Callable[[], Tensor]] = {
        name: functools.partial(integer_product, x, joined, name)
        for name in LIBRARIES
        if LIBRARIES[name].is_exact
    }
    least = least_seconds(calls, 6, before=cache_emptier())
    several = "onednn" if CLEARLY * least.get("onednn", torch.inf) < least["fbgemm"] else "fbgemm"
    integers = FEW
    for rows in ROWS:
        x = torch.ones(rows, 1024)
        both = {
            "integers": functools.partial(integer_product, x, joined, several),
            "floats": functools.partial(float_product, x, joined),
        }
        times = least_seconds(both, 3)
        if times["floats"] < times["integers"]:
            break
        integers = rows
    return Int8Config(several=several, integers=integers)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


SECTION = Section("int8 products", fixed=Int8Config(), measure=_measure)


class Int8Weight(QuantizedWeight):
    """A weight [O, I]: integers `weight` [O, I] and `scale` [O]; see `polyformer.core.ops.int8`."""

    scale: Tensor

    def __init__(self, weight: Tensor):
        super().__init__(weight)
        integers, scale = quantized(weight)
        self.register_buffer("weight", integers)
        self.register_buffer("scale", scale)

    def dequantized(self) -> Tensor:
        return dequantized(self.weight, self.scale)

    def simple_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `product` on a GPU, or by the definition."""
        if has_gpu_product(x, self.weight):
            return gpu_product(x, self.weight, self.scale, bias)
        return super().simple_product(x, bias)

    def stacked(self, layers: "Sequence[Int8Weight]", biases: Sequence[Tensor | None]) -> StackedWeights:
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
