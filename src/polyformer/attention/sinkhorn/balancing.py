"""Sinkhorn balancing in log space: rows and columns are divided by their sums in turn, rows last.

    columns    L_ij <- L_ij - log sum_i' e^L_i'j
    rows       L_ij <- L_ij - log sum_j' e^L_ij'

Causally the sum over a column has the rows i' <= i alone. By induction over the iterations row i then
depends on the rows up to it, and rows can come in runs: what a later run needs of the earlier rows is
`taken`, the log of each column's sum in every iteration. A block counts less the more the rows before have
taken of it.
"""

import torch
from torch import Tensor

FLOOR = -1e30
"""The log of nothing: infinities would make the gradients of rows without a block NaN."""


def filled_mass(mass: Tensor) -> tuple[Tensor, Tensor]:
    """The masses of places of sorted blocks, 1 where a place counts as empty, and their logs, -inf there.

    Subnormal masses count as none: the gradient of what is divided by a mass has its inverse, which would
    overflow, and a softmax that has any other key cannot tell such a mass from none.
    """
    numbers = torch.finfo(mass.dtype)
    empty = mass < numbers.tiny / numbers.eps
    some = mass.masked_fill(empty, 1.0)
    return some, some.log().masked_fill(empty, -torch.inf)


def gumbel(like: Tensor) -> Tensor:
    """Gumbel noise of the same shape, from torch's generator."""
    tiny = torch.finfo(like.dtype).tiny
    return -torch.empty_like(like, requires_grad=False).exponential_().clamp_min(tiny).log()


def balanced(
    scores: Tensor, allowed: Tensor, iterations: int, taken: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """S and the next `taken`.

    Args:
        scores: [B, H, A, N], the rows of a run.
        allowed: bool, broadcasts to it. Other entries are 0; rows and columns without any are.
        taken: [B, H, iterations, N] of the runs before, None for the first and without causality.
    """
    sums, log = [], _by_rows(scores, allowed)
    for number in range(iterations):
        if causal:
            before = torch.full_like(log[:, :, :1], FLOOR) if taken is None else taken[:, :, number, None]
            total = torch.cat([before, log], 2).logcumsumexp(2)
            sums.append(total[:, :, -1])
            total = total[:, :, 1:]
        else:
            total = log.logsumexp(2, keepdim=True)
        log = _by_rows(log - total, allowed)
    return log.exp().masked_fill(~allowed, 0.0), torch.stack(sums, 2) if causal else None


def _by_rows(log: Tensor, allowed: Tensor) -> Tensor:
    log = log.masked_fill(~allowed, FLOOR)
    return (log - log.logsumexp(3, keepdim=True)).masked_fill(~allowed, FLOOR)
