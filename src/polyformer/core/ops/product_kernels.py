"""The library for each matrix product, chosen by size from measurements on this machine.

BLAS is often tuned for the processors of another vendor; there oneDNN, which compiles its kernels for the
current processor, is twice as fast. On other processors oneDNN loses half of its speed for transposed
matrices, as in gradients. This cannot be predicted, so every product of a linear layer is tried with every
kernel, and batches of products, as of attention, with BLAS's batched product and with oneDNN for each.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.cpu import threads
from polyformer.core.ops.tuning import Section, least_seconds
from polyformer.core.ranges import PositiveInt

Kernel = Literal["blas", "onednn", "onednn_copied"]
BLAS, ONEDNN, ONEDNN_COPIED = typing.get_args(Kernel)
"""Plain torch; oneDNN; oneDNN with a fresh copy of the weight in the layout that it prefers."""

PASSES = "forward", "grad_input", "grad_weight"

ROW_STEP = 64
"""Longer inputs are padded to a multiple of this number of rows.

oneDNN compiles and caches a kernel of about a megabyte for every shape, and batches of text have hundreds of
lengths.
"""

CLEARLY, AT_LEAST = 1.07, 5e-6
"""The factor and the seconds by which another kernel must be faster than plain torch to be chosen."""

ROUNDS, DECIDED, SECONDS = 3, 1.3, 0.75
"""The most tries of a product; the factor between kernels above which one try suffices; seconds of CPU time.

Sizes that are not measured in this time use the kernel of the nearest measured size.
"""

Size = tuple[int, int, int]
"""Rows, inputs and outputs of a linear layer."""

SHAPES = (768, 3072), (3072, 768), (768, 768), (768, 8192), (256, 1024), (1024, 256), (128, 128)
CHEAP: list[Size] = [
    *((rows, *shape) for rows in (1, 8) for shape in SHAPES),
    *((rows, *shape) for rows in (64, 512, 2048) for shape in ((64, 64), (128, 512), (512, 128))),
]
SIZES: dict[str, list[Size]] = {
    "forward": [*CHEAP, *((128, *shape) for shape in SHAPES)],
    "grad_input": [*CHEAP, *((128, *shape) for shape in SHAPES)],
    # Here rows are summed over: a product with few rows differs.
    "grad_weight": [*CHEAP, *((384, *shape) for shape in SHAPES if shape != (768, 8192))],
}
"""The measured sizes, from real layers; among the costly sizes the most important come first."""

CANDIDATES: dict[str, tuple[Kernel, ...]] = {
    "forward": (BLAS, ONEDNN),
    "grad_input": (BLAS, ONEDNN, ONEDNN_COPIED),
    "grad_weight": (BLAS, ONEDNN),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductKernels(Config):
    """The fastest kernel of each pass for some sizes, written "ROWSxINPUTSxOUTPUTS"; empty: plain torch."""

    forward: dict[str, Kernel] = dataclasses.field(default_factory=dict)
    grad_input: dict[str, Kernel] = dataclasses.field(default_factory=dict)
    grad_weight: dict[str, Kernel] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._measured  # noqa: B018 - raises the error of an invalid size now

    @functools.cached_property
    def layer_kernels(self) -> "Callable[[int, int, int], LayerKernels]":
        """A function from the numbers in an input [..., I], O and I to the kernels of the layer."""
        return functools.lru_cache(4096)(
            lambda numbers, outputs, inputs: self.kernels(numbers // inputs, inputs, outputs)
        )

    def kernels(self, rows: int, inputs: int, outputs: int) -> "LayerKernels":
        """Return the kernels of a layer of these sizes: each pass as for the nearest measured size."""
        return LayerKernels._make(_nearest(self._measured[name], (rows, inputs, outputs)) for name in PASSES)

    @functools.cached_property
    def _measured(self) -> dict[str, dict[Size, Kernel]]:
        return {
            name: {_size(size): kernel for size, kernel in getattr(self, name).items()} for name in PASSES
        }


class LayerKernels(NamedTuple):
    """The kernel of each pass of a layer."""

    forward: Kernel
    grad_input: Kernel
    grad_weight: Kernel


PLAIN = LayerKernels(BLAS, BLAS, BLAS)


def _nearest(measured: dict[Size, Kernel], size: Size) -> Kernel:
    """Return the kernel of the measured size with the least distance, in doublings."""
    distances = {other: sum(abs(math.log2(a / b)) for a, b in zip(size, other)) for other in measured}
    return measured[min(distances, key=distances.__getitem__)] if measured else BLAS


def _size(text: str) -> Size:
    try:
        rows, inputs, outputs = map(int, text.split("x"))
    except ValueError:
        rows = inputs = outputs = 0
    if min(rows, inputs, outputs) < 1:
        raise InputError(f"product: expected ROWSxINPUTSxOUTPUTS, got {quote(text)}")
    return rows, inputs, outputs


ONEDNN_BUILT = torch.backends.mkldnn.is_available()


def onednn_takes(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether oneDNN may compute a product: eager, on a CPU, outside autocast and torch.func."""
    return (
        x.dtype == weight.dtype == dtype
        and x.is_cpu
        and weight.is_cpu
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # torch.jit.trace cannot record these operations
        and ONEDNN_BUILT
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and x.numel() > 0
    )


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [N, I] times weight [O, I] transposed plus bias [O] by oneDNN; not differentiable."""
    y = torch.ops.mkldnn._linear_pointwise(_padded(x), weight, bias, "none", [], "")
    return y[: len(x)]


def _padded(rows: Tensor) -> Tensor:
    """Return rows [N, I] padded with zeros to a multiple of `ROW_STEP`; few rows are not padded."""
    missing = -len(rows) % ROW_STEP
    return F.pad(rows, (0, 0, 0, missing)) if missing and len(rows) > ROW_STEP else rows


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: str) -> Tensor:
    """Return y = x [N, I] weight [O, I]^T + bias [O]."""
    if kernel == BLAS:
        return F.linear(x, weight, bias)
    return onednn_product(x, weight if kernel == ONEDNN else weight.contiguous(), bias)


def grad_input(grad: Tensor, weight: Tensor, kernel: str) -> Tensor:
    """Return grad [N, O] weight [O, I], the gradient of a layer's input, [N, I]."""
    if kernel == BLAS:
        return grad @ weight
    return onednn_product(grad, weight.T if kernel == ONEDNN else weight.T.contiguous())


def grad_weight(grad: Tensor, x: Tensor, kernel: str) -> Tensor:
    """Return grad [N, O]^T x [N, I], the gradient of a layer's weight, [O, I]."""
    if kernel == BLAS:
        return grad.T @ x
    return onednn_product(_padded(grad).T, _padded(x).T)


def measure() -> ProductKernels:
    """Measure every pass of some layers with every kernel, the passes in turn, within the time limit."""
    kernels: dict[str, dict[str, Kernel]] = {name: {} for name in PASSES}
    if not torch.backends.mkldnn.is_available():
        return ProductKernels()
    end = time.thread_time() + SECONDS  # CPU time: a busy machine measures the same work
    for sizes in itertools.zip_longest(*SIZES.values()):
        for name, size in zip(SIZES, sizes):
            if size is not None and time.thread_time() < end:
                kernels[name]["x".join(map(str, size))] = _fastest(_pass(name, size), CANDIDATES[name])
    return ProductKernels(**kernels)


def _pass(name: str, size: Size) -> Callable[[Kernel], Tensor]:
    """Return one pass of a layer of this size as a function of the kernel."""
    rows, inputs, outputs = size
    x, weight, grad = (
        torch.full(shape, 0.5, device="cpu", dtype=torch.float32)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    if name == "forward":
        return functools.partial(forward, x, weight, None)
    if name == "grad_input":
        return functools.partial(grad_input, grad, weight)
    return functools.partial(grad_weight, grad, x)


def _fastest(compute: Callable[[Kernel], Tensor], kernels: tuple[Kernel, ...]) -> Kernel:
    """Return the kernel that took the least time; plain torch, the first, if none is clearly faster."""
    calls = {kernel: functools.partial(compute, kernel) for kernel in kernels}
    # Decided once plain torch is the fastest, or far from it.
    least = least_seconds(calls, ROUNDS, lambda least: not 1 < least[BLAS] / min(least.values()) < DECIDED)
    best = min(kernels, key=lambda kernel: least[kernel])
    return best if least[BLAS] > max(CLEARLY * least[best], least[best] + AT_LEAST) else BLAS


PRODUCTS = Section("products", ProductKernels(), measure)


@contextlib.contextmanager
def counted_flops(formulas: Mapping[Any, Any] | None = None) -> Iterator[Any]:
    """Count the FLOPs of all operations inside, with torch's counter: `get_total_flops()`.

    formulas: of further operations, as `custom_mapping` of `FlopCounterMode`. Products are torch's meanwhile:
    the counter does not know oneDNN's, which are the faster ones on some processors.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=dict(formulas or {}))
    with PRODUCTS.using(ProductKernels()), counter:
        yield counter


NEVER = 1 << 62

BATCH_CLEARLY = 1.03
"""The factor by which oneDNN must be faster to be chosen."""

WIDTH = 64
"""The head dimension in the measurements."""

TILES = (64, 256), (64, 512), (128, 512), (256, 512), (256, 1024)
"""Queries and keys of the measured tiles, from small to large."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchedProducts(Config):
    """The least numbers of multiplications for which oneDNN's overhead pays off."""

    plain: PositiveInt = 1 << 24
    transposed: PositiveInt = 1 << 24  # if the first matrix is transposed, which slows BLAS less


@dataclasses.dataclass(frozen=True)
class BatchedKernel:
    """The library for products of matrices like the arguments of `of`."""

    plain: int
    transposed: int

    @staticmethod
    def of(a: Tensor, b: Tensor) -> "BatchedKernel":
        """Return the current choices, if oneDNN may compute products of two such matrices at all."""
        if not onednn_takes(a, b):
            return ONLY_BLAS
        choice = BATCHED_PRODUCTS()
        return BatchedKernel(choice.plain, choice.transposed)

    def by_onednn(self, a: Tensor, b: Tensor) -> bool:
        """Return whether oneDNN should compute each product of a [N, M, K] and b [N, K, P]."""
        smallest = self.plain if a.stride(2) == 1 else self.transposed
        return a.shape[1] * b.shape[1] * b.shape[2] >= smallest

    def __call__(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the same as `product`."""
        if not self.by_onednn(a, b):
            return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
        if len(a) == 1 and out is None:
            return _onednn(a, b[0])
        parts = [_onednn(x, y) for x, y in zip(a, b)]
        return torch.stack(parts) if out is None else torch.stack(parts, out=out)


ONLY_BLAS = BatchedKernel(NEVER, NEVER)


@dataclasses.dataclass(frozen=True)
class HalfProducts(BatchedKernel):
    """Products on a GPU of factors rounded to `dtype`; sums and results are in float32."""

    plain: int = NEVER
    transposed: int = NEVER
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the same as `product`, in float32."""
        a, b = a.to(self.dtype), b.to(self.dtype)
        return torch.bmm(a, b, torch.float32) if out is None else torch.bmm(a, b, torch.float32, out=out)


def product_kernel(a: Tensor, b: Tensor, stored: torch.dtype) -> BatchedKernel:
    """Return the library for products of float32 matrices that were computed from matrices of type `stored`.

    A GPU multiplies float16 and bfloat16 many times as fast as float32. A CPU multiplies in float32.
    """
    if a.is_cuda and stored in (torch.float16, torch.bfloat16):
        return HalfProducts(dtype=stored)
    return BatchedKernel.of(a, b)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a [N, M, K] @ b [N, K, P]: [N, M, P], written to `out` if given; not differentiable."""
    return BatchedKernel.of(a, b)(a, b, out)


def _onednn(x: Tensor, y: Tensor) -> Tensor:
    """Return x [..., M, K] @ y [K, P], with y made dense: oneDNN is slow for rows with gaps."""
    weight = y.mT
    if not (weight.is_contiguous() or y.is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def _measure_batched() -> BatchedProducts:
    """Measure products of attention tiles with one thread: threads divide tiles, not products."""
    if not torch.backends.mkldnn.is_available():
        return BatchedProducts(plain=NEVER, transposed=NEVER)
    with threads(1):
        plain = {sizes: _gain(*sizes, transposed=False) for sizes in TILES}
        transposed = {sizes: _gain(*sizes, transposed=True) for sizes in TILES}
    return BatchedProducts(plain=_smallest(plain), transposed=_smallest(transposed))


def _gain(queries: int, keys: int, transposed: bool) -> float:
    """Return the speed of oneDNN relative to BLAS in a tile's products.

    transposed: for the products with a transposed first matrix, otherwise for the others.
    """
    q, k = (torch.full((1, n, WIDTH), 0.5, dtype=torch.float32) for n in (queries, keys))
    weights = torch.full((1, queries, keys), 0.5, dtype=torch.float32)
    pairs = [(weights.mT, q)] if transposed else [(q, k.mT), (weights, k)]
    blas, onednn = lambda: [torch.bmm(a, b) for a, b in pairs], lambda: [_onednn(a, b[0]) for a, b in pairs]
    seconds = least_seconds({"blas": blas, "onednn": onednn}, rounds=5)
    return seconds["blas"] / seconds["onednn"]


def _smallest(gains: dict[tuple[int, int], float]) -> int:
    """Return the least size from which on all products are faster."""
    smallest = NEVER
    for (queries, keys), gain in reversed(gains.items()):
        if gain < BATCH_CLEARLY:
            break
        smallest = queries * keys * WIDTH
    return smallest


BATCHED_PRODUCTS = Section("batched products", BatchedProducts(), _measure_batched)
