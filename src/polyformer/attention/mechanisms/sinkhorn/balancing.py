"""The soft permutation of blocks: scores of a network, balanced in log space (Sinkhorn), rows last.

    columns    L_ij <- L_ij - log sum_i' e^L_i'j
    rows       L_ij <- L_ij - log sum_j' e^L_ij'

The causal form sums each column only over the rows i' <= i. By induction over the iterations row i then
depends only on the rows up to i, and rows can be computed in runs: a later run requires only `column_sums`,
the log of each column's sum over the earlier rows in every iteration. A block gets less weight the more
weight the earlier rows have assigned to it.
"""

import math

import torch
from torch import Tensor, nn

from polyformer.core.ops.autograd import mark_first_order


class SortingNet(nn.Module):
    """R_i = relu(r_i W_P + b_P) W_B + b_B, with separate parameters per head.

    `count` is the maximum number of blocks of a document.
    """

    def __init__(self, heads: int, width: int, count: int):
        super().__init__()
        deviation = 1 / math.sqrt(width)
        self.hidden = nn.Parameter(torch.empty(heads, width, width).normal_(0.0, deviation))
        self.hidden_bias = nn.Parameter(torch.zeros(heads, width))
        self.scores = nn.Parameter(torch.empty(heads, width, count).normal_(0.0, deviation))
        self.scores_bias = nn.Parameter(torch.zeros(heads, count))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [..., H, N, count] of representations [..., H, N, D]."""
        hidden, scores = self.hidden.to(x.dtype), self.scores.to(x.dtype)
        # [..., H, N, D] @ [H, D, D]: a matrix per head.
        x = torch.relu(x @ hidden + self.hidden_bias.to(x.dtype).unsqueeze(1))
        return x @ scores + self.scores_bias.to(x.dtype).unsqueeze(1)


FLOOR = -1e30
"""The log of 0 in finite form: infinities would make the gradients of rows without a block NaN."""


def filled_mass(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masses of the places of sorted blocks, with 1 for empty places, and their logs, with -inf.

    Subnormal masses count as empty: the gradient of a quotient contains the inverse of its denominator, which
    would overflow, and a softmax over any other key cannot distinguish such a mass from 0.
    """
    numbers = torch.finfo(mass.dtype)
    empty = mass < numbers.tiny / numbers.eps
    some = mass.masked_fill(empty, 1.0)
    return some, some.log().masked_fill(empty, -torch.inf)


def gumbel(like: Tensor) -> Tensor:
    """Return Gumbel noise of the same shape, from torch's generator."""
    tiny = torch.finfo(like.dtype).tiny
    return -torch.empty_like(like, requires_grad=False).exponential_().clamp_min(tiny).log()


def sinkhorn_balance(
    scores: Tensor, allowed: Tensor, iterations: int, column_sums: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the balanced matrix S and the next `column_sums`.

    Args:
        scores: [B, H, A, N], the rows of a run.
        allowed: bool, broadcasts to `scores`. Other entries of S are 0, also in rows and columns without any.
        column_sums: [B, H, iterations, N] of the earlier runs, None for the first run and without causality.
    """
    sums, log = [], _normalize_rows(scores, allowed)
    for number in range(iterations):
        if causal:
            before = torch.full_like(log[:, :, :1], FLOOR)
            if column_sums is not None:
                before = column_sums[:, :, number, None]
            # The sums of earlier runs are a row before the first: one cumulative sum covers all i' <= i.
            total = torch.cat([before, log], 2).logcumsumexp(2)
            mark_first_order(total, "Sinkhorn balancing over earlier blocks")
            sums.append(total[:, :, -1])
            total = total[:, :, 1:]
        else:
            total = log.logsumexp(2, keepdim=True)
        # Rows come last, so that every sorted block is an average.
        log = _normalize_rows(log - total, allowed)
    return log.exp().masked_fill(~allowed, 0.0), torch.stack(sums, 2) if causal else None


def _normalize_rows(log: Tensor, allowed: Tensor) -> Tensor:
    log = log.masked_fill(~allowed, FLOOR)
    return (log - log.logsumexp(3, keepdim=True)).masked_fill(~allowed, FLOOR)
