"""Batches of matrix products, each by oneDNN if that is faster than BLAS's batched product."""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.ops.cpu import threads
from polyformer.core.ops.linear import onednn_takes
from polyformer.core.ops.tuning import Section, least_seconds
from polyformer.core.ranges import PositiveInt

NEVER = 1 << 62

CLEARLY = 1.03
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


def _measure() -> BatchedProducts:
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
        if gain < CLEARLY:
            break
        smallest = queries * keys * WIDTH
    return smallest


BATCHED_PRODUCTS = Section("batched products", BatchedProducts(), _measure)
