"""Linformer by its equation, over all n columns: what the fast form is tested against.

    y = softmax(q (E k)^T / sqrt(D)) (F v)        E, F [k, n] for n columns, one a position

`held` [B or 1, n, T] is 1 where real token t has the column, so that E x is E held x for tokens x; `inside`
[B or 1, k, T] is 1 where real token t stands in the window of the row.
"""

import torch
from torch import Tensor

from polyformer.ops.dropout import dropout
from polyformer.ops.softmax import softmax


def definition(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, dropped: float) -> Tensor:
    """softmax(q keys^T / sqrt(D)) values: q [B, H, Tq, D], rows E k, F v [B, Hkv, k, D] -> [B, H, Tq, D].

    seen: [B or 1, k], which rows hold tokens, None for all; dropped: the probability to drop a weight.
    """
    groups = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    allowed = None if seen is None else seen[:, None, None]
    weights, _ = softmax(q @ keys.mT * q.shape[3] ** -0.5, allowed)
    return dropout(weights, dropped) @ values


def matrix_rows(x: Tensor, held: Tensor, matrix: Tensor) -> Tensor:
    """E held x, of x [B, H, T, D] and E [H or 1, k, n]: [B, H, k, D]."""
    matrix, held = matrix.to(x.dtype).expand(x.shape[1], -1, -1), held.to(x.dtype).expand(len(x), -1, -1)
    return torch.einsum("hkn,bnt,bhtd->bhkd", matrix, held, x)


def mean_rows(x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the tokens inside each window, [B, H, k, D], and which windows have a token, [B or 1,
    k]."""
    inside = inside.to(x.dtype).unsqueeze(1)
    counts = inside.sum(3, keepdim=True)
    return inside @ x / counts.clamp_min(1), counts[:, 0, :, 0] > 0


def max_rows(x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of the tokens inside each window, [B, H, k, D], and which windows have a token, [B or 1,
    k]."""
    rows = [x.masked_fill(~window[:, None, :, None], -torch.inf).amax(2) for window in inside.unbind(1)]
    seen = inside.any(2)
    return torch.stack(rows, 2).masked_fill(~seen[:, None, :, None], 0.0), seen


def convolution_rows(x: Tensor, held: Tensor, kernel: Tensor) -> Tensor:
    """sum_s x_(r step + s) W_s for every row r, kernel W [H or 1, step, D, D]: [B, H, k, D]."""
    columns = (held.to(x.dtype).unsqueeze(1) @ x).unflatten(2, (-1, kernel.shape[1]))  # [B, H, k, step, D]
    kernel = kernel.to(x.dtype).expand(x.shape[1], -1, -1, -1)
    return torch.einsum("bhksd,hsde->bhke", columns, kernel)
