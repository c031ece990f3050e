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
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.documents import documents_of_row
from polyformer.attention.mechanisms.sinkhorn.balancing import SortingNet, filled_mass, gumbel
from polyformer.core.ops.softmax import record, safe_logsumexp
from polyformer.core.sequence.context import Context


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
