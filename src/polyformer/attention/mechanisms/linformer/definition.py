"""The equation of Linformer over all n columns, the reference that tests compare the fast form with.

    y = softmax(q (E k)^T / sqrt(D)) (F v)        E, F [k, n], one column per position

`column_mask` C [B or 1, n, T] is 1 where non-padding token t has the column: E x is E C x. `inside`
[B or 1, k, T] is 1 where non-padding token t is in the window of the row.
"""

import torch
from torch import Tensor

from polyformer.core.ops.dropout import dropout
from polyformer.core.ops.softmax import softmax


def definition(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, dropped: float) -> Tensor:
    """Return softmax(q keys^T / sqrt(D)) values [B, H, Tq, D].

    Args:
        q: [B, H, Tq, D].
        keys, values: the rows E k and F v, [B, Hkv, k, D].
        seen: [B or 1, k], which rows have tokens, None for all.
        dropped: the dropout probability of the weights.
    """
    groups = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    allowed = None if seen is None else seen[:, None, None]
    weights, _ = softmax(q @ keys.mT * q.shape[3] ** -0.5, allowed)
    return dropout(weights, dropped) @ values


def matrix_rows(x: Tensor, column_mask: Tensor, matrix: Tensor) -> Tensor:
    """Return E C x [B, H, k, D] for x [B, H, T, D] and E [H or 1, k, n]."""
    matrix, column_mask = (
        matrix.to(x.dtype).expand(x.shape[1], -1, -1),
        column_mask.to(x.dtype).expand(len(x), -1, -1),
    )
    return torch.einsum("hkn,bnt,bhtd->bhkd", matrix, column_mask, x)


def mean_rows(x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the tokens in each window [B, H, k, D], and the windows with tokens [B or 1, k]."""
    inside = inside.to(x.dtype).unsqueeze(1)
    counts = inside.sum(3, keepdim=True)
    return inside @ x / counts.clamp_min(1), counts[:, 0, :, 0] > 0


def max_rows(x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of the tokens in each window [B, H, k, D], and the windows with any [B or 1, k]."""
    rows = [x.masked_fill(~window[:, None, :, None], -torch.inf).amax(2) for window in inside.unbind(1)]
    seen = inside.any(2)
    return torch.stack(rows, 2).masked_fill(~seen[:, None, :, None], 0.0), seen


def convolution_rows(x: Tensor, column_mask: Tensor, kernel: Tensor) -> Tensor:
    """Return sum_s x_(r step + s) W_s for every row r, with kernel W [H or 1, step, D, D]: [B, H, k, D]."""
    columns = (column_mask.to(x.dtype).unsqueeze(1) @ x).unflatten(
        2, (-1, kernel.shape[1])
    )  # [B, H, k, step, D]
    kernel = kernel.to(x.dtype).expand(x.shape[1], -1, -1, -1)
    return torch.einsum("bhksd,hsde->bhke", columns, kernel)
