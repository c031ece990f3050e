"""Softmax attention in tiles of selected queries and keys, with the terms of a position scheme.

    y_i = sum_j p_ij (v_j + position_values[d])        p_ij = softmax over the tile's keys allowed for i

The backward pass recomputes each tile (activation checkpointing), so that only inputs and outputs are saved.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyformer.attention.mechanisms.pair_terms import Pairs, PairTerms
from polyformer.core.ops.cache_capacity import cache_capacity
from polyformer.core.ops.dropout import dropout
from polyformer.core.ops.softmax import softmax


@dataclasses.dataclass(frozen=True, eq=False)
class PairTiles:
    """n tiles that are computed together.

    Args:
        queries: [n, Q], the rows of q of each tile.
        keys: [n, L], the rows of k and v.
        pairs: the batch rows, heads and slots of these queries and keys.
        allowed: returns the mask [n, Q, L] of the pairs; called again in the backward pass.
    """

    queries: Tensor
    keys: Tensor
    pairs: Pairs
    allowed: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRows:
    """Tokens as rows: q and the vectors `content` for position keys, [Nq, D]; k [Nk, D], v [Nk, Dv]."""

    q: Tensor
    content: Tensor
    k: Tensor
    v: Tensor


def tile_attention(
    rows: TokenRows, tiles: PairTiles, terms: PairTerms, dropped: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output [n, Q, Dv], log-sum-exp [n, Q], and whether each query has any allowed key, [n, Q].

    dropped: the dropout probability of the weights.
    """

    def run() -> tuple[Tensor, Tensor, Tensor]:
        # [n, Q, D] for queries, [n, L, D] for keys.
        queries, content = (_gather_rows(x, tiles.queries) for x in (rows.q, rows.content))
        keys, values = (_gather_rows(x, tiles.keys) for x in (rows.k, rows.v))
        scores = terms.scores(queries @ keys.mT * terms.scale, tiles.pairs, content, keys)
        allowed = tiles.allowed()
        weights, lse = softmax(scores, allowed)
        weights = dropout(weights, dropped)
        out, more = weights @ values, terms.values(weights, tiles.pairs)
        return out if more is None else out + more, lse, allowed.any(-1)

    if not torch.is_grad_enabled():
        return run()
    # Only dropout requires the random state of the forward pass when a tile is recomputed.
    return checkpoint(run, use_reentrant=False, preserve_rng_state=dropped > 0)  # type: ignore[return-value]


def max_elements(q: Tensor, terms: PairTerms) -> int:
    """Return the maximum number of elements for tiles computed together, for the queries q of a whole call.

    With gradients the limit exceeds the cache: every group of tiles writes gradients as large as all of q, k,
    v and the scheme's tables, so small groups would be slower.
    """
    if not torch.is_grad_enabled():
        return cache_capacity(q)
    tables = () if terms.relative is None else terms.relative.tables.values()
    return max(cache_capacity(q), q.numel() // 2, *(2 * x.numel() for x in tables if x.requires_grad))


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return rows [n, M, D] of x [N, D]."""
    return x.index_select(0, index.flatten()).view(*index.shape, x.shape[1])
