"""The library for each product of a linear layer, chosen by size from measurements on this machine.

BLAS is often tuned for the processors of another vendor; there oneDNN, which compiles its kernels for the
current processor, is twice as fast. On other processors oneDNN loses half of its speed for transposed
matrices, as in gradients. This cannot be predicted, so every product is tried with every kernel.
"""

import dataclasses
import functools
import itertools
import math
import time
import typing
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.tuning import Section, least_seconds

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
