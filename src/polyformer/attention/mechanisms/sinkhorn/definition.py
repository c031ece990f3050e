"""The equations of Sinkhorn attention, document by document, the reference for tests of the fast form.

Blocks have `size` tokens and the last block of a document has the rest: N blocks; place t of block j is token
j size + t. For every head:

    r_i = mean of the keys of block i          causal: of all keys up to block i's first
    R_ij = SortingNet(r_i)_j                   i, j = 1 .. N, causal: j < i
    L = R / temperature                        in training (R + Gumbel noise) / temperature
    L_ij <- L_ij - log sum_j' e^L_ij'          rows
    `iterations` times:
        L_ij <- L_ij - log sum_i' e^L_i'j      columns; causal: over the rows i' <= i
        L_ij <- L_ij - log sum_j' e^L_ij'      rows
    S = e^L                                    doubly stochastic in the limit; causal: only rows sum to 1

    m_it = sum_j S_ij                          over the blocks j that have a token at place t
    k'_it = sum_j S_ij k_jt / m_it             the sorted block i, and v' likewise

    y = softmax over [own block; sorted block i] of [q . k / sqrt(D); q . k'_t / sqrt(D) + log m_it]
        of the values [v; v']                  causal: the own block up to the query

With `cut`, a query attends only to the sorted blocks 1 .. cut.

The causal form sums each column only over the rows i' <= i. By induction over the iterations row i then
depends only on the rows up to i, and rows can be computed in runs: a later run requires only `column_sums`,
the log of each column's sum over the earlier rows in every iteration. A block gets less weight the more
weight the earlier rows have assigned to it.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.documents import documents_of_row
from polyformer.core.ops.autograd import mark_first_order
from polyformer.core.ops.softmax import record, safe_logsumexp
from polyformer.core.sequence.context import Context


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


@dataclasses.dataclass(frozen=True)
class SortingOptions:
    """Options of the sorting of blocks of `size` tokens.

    `noisy`: whether Gumbel noise is added (training). `cut`: the number of sorted blocks that all queries
    attend to, None if each attends to its own block and the block sorted into its place.
    """

    size: int
    iterations: int
    temperature: float
    noisy: bool
    cut: int | None = None


def definition(
    q: Tensor, k: Tensor, v: Tensor, net: SortingNet, sorting: SortingOptions, context: Context
) -> Tensor:
    """Return the attention output [B, H, Tq, D] of q [B, H, Tq, D] and k, v [B, H, Tk, D].

    The attention matrix over tokens is built explicitly and multiplied by v.
    """
    attention = q.new_zeros(*q.shape[:3], k.shape[2])
    for b in range(len(q)):
        for tokens in documents_of_row(context, b):
            where = torch.tensor(tokens, device=q.device)
            keys = k[b, :, where]
            places = sorted_places(keys, permutation(keys, net, sorting, context.causal), sorting.size)
            for rank, token in enumerate(tokens):
                query = token - context.offset
                if 0 <= query < q.shape[2]:
                    attention[b, :, query, where] = weights(
                        q[b, :, query], keys, places, rank, sorting, context.causal
                    )
    record(attention)
    return attention @ v


def permutation(k: Tensor, net: SortingNet, sorting: SortingOptions, causal: bool) -> Tensor:
    """Return S [H, N, N] for the keys [H, n, D] of a document."""
    blocks = k.split(sorting.size, 1)
    if causal:
        means = [k[:, : i * sorting.size + 1].mean(1) for i in range(len(blocks))]
    else:
        means = [block.mean(1) for block in blocks]
    scores = net(torch.stack(means, 1))[..., : len(blocks)]
    scores = (scores + gumbel(scores) if sorting.noisy else scores) / sorting.temperature
    # Causal: only blocks j < i may be sorted into place i.
    earlier = torch.ones_like(scores[0], dtype=torch.bool).tril(-1)
    allowed = earlier if causal else torch.ones_like(earlier)
    log = _normalize(scores, allowed, rows=True)
    for _ in range(sorting.iterations):
        if causal:  # balance the columns of rows 0 .. i and keep only row i
            log = torch.stack(
                [_normalize(log[:, : i + 1], allowed[: i + 1])[:, i] for i in range(len(blocks))], 1
            )
        else:
            log = _normalize(log, allowed)
        log = _normalize(log, allowed, rows=True)
    return log.exp()


def _normalize(log: Tensor, allowed: Tensor, rows: bool = False) -> Tensor:
    """Return log [H, N, N] minus the log of the sums of the allowed entries in each column (or row)."""
    log = log.masked_fill(~allowed, -torch.inf)
    sums = safe_logsumexp(log).unsqueeze(2) if rows else safe_logsumexp(log.mT).unsqueeze(1)
    return (log - sums.masked_fill(sums == -torch.inf, 0.0)).masked_fill(~allowed, -torch.inf)


def sorted_places(k: Tensor, s: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the weight of every token in each place of the sorted blocks, and m.

    The weights are S_ij / m_it, [H, N, size, n]; m is [H, N, size].
    """
    n, count = k.shape[1], s.shape[1]
    real = (torch.arange(count * size, device=k.device) < n).view(count, size)
    mass = s @ real.to(s.dtype)
    share = s.unsqueeze(2) * real.mT / filled_mass(mass)[0].unsqueeze(3)  # [H, i, t, j]
    # Sorting keeps places: place t of a block goes to place t.
    same_place = torch.eye(size, dtype=s.dtype, device=k.device)
    return torch.einsum("hitj,tu->hitju", share, same_place).flatten(3)[..., :n], mass


def weights(
    q: Tensor, k: Tensor, places: tuple[Tensor, Tensor], rank: int, sorting: SortingOptions, causal: bool
) -> Tensor:
    """Return the weights [H, n] of the query q [H, D] of token `rank` over the n tokens of its document."""
    (shares, mass), block = places, rank // sorting.size
    chosen = slice(block, block + 1) if sorting.cut is None else slice(sorting.cut)
    shares, mass = shares[:, chosen].flatten(1, 2), mass[:, chosen].flatten(1)
    _, log_mass = filled_mass(mass)
    start, stop = block * sorting.size, (block + 1) * sorting.size
    stop = start if sorting.cut is not None else min(stop, rank + 1) if causal else min(stop, k.shape[1])
    keys = torch.cat([k[:, start:stop], shares @ k], 1)
    scores = (keys @ q.unsqueeze(2)).squeeze(2) / math.sqrt(q.shape[1])
    scores = scores + F.pad(log_mass, (stop - start, 0))
    # One softmax over the own block and the sorted block.
    own, of_sorted = scores.softmax(1).split([stop - start, shares.shape[1]], 1)
    return F.pad(own, (start, k.shape[1] - stop)) + (of_sorted.unsqueeze(1) @ shares).squeeze(1)
