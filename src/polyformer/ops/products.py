"""Batches of matrix products, each through oneDNN where that is faster than BLAS's batched product."""

import torch
from torch import Tensor

from polyformer.ops.linear import onednn_takes

SMALLEST = 1 << 24
"""Multiplications below which starting oneDNN, once per product, costs more than it wins."""


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [N, M, K] @ b [N, K, P]: [N, M, P], written to `out` if given; not differentiated."""
    if a.shape[1] * b.shape[1] * b.shape[2] < SMALLEST or not onednn_takes(a, b):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    parts = [torch.ops.mkldnn._linear_pointwise(x, _dense(y).mT, None, "none", [], "") for x, y in zip(a, b)]
    if len(parts) == 1 and out is None:
        return parts[0].unsqueeze(0)
    return torch.stack(parts) if out is None else torch.stack(parts, out=out)


def _dense(y: Tensor) -> Tensor:
    """[K, P] without gaps: oneDNN takes a few heads out of all of them by its slow reference code."""
    return y if y.is_contiguous() or y.mT.is_contiguous() else y.contiguous()
