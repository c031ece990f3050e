"""Attention in sorted order with the terms of a position scheme: each query attends to an interval of keys.

Tiles are built by `interval_tiles`, each of one cluster, so that all its scores belong to one head.
Neighbours in a cluster may have any distance, so the scheme's tables are looked up pair by pair
(`tile_attention`).
"""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.pair_terms import Pairs, PairTerms
from polyformer.attention.mechanisms.routing.definition import RoutedHeads
from polyformer.attention.mechanisms.routing.interval_tiles import BLOCK, Tiles, tiles
from polyformer.attention.mechanisms.routing.intervals import Intervals
from polyformer.attention.mechanisms.tile_attention import PairTiles, TokenRows, max_elements, tile_attention


def interval_attention_with_terms(
    heads: RoutedHeads, intervals: Intervals, window: int, terms: PairTerms
) -> Tensor:
    """Return output [B, H, Tq, Dv] over the intervals of at most `window` keys; zeros without keys."""
    # The memory layout of the projections, [B, T, H, D], which avoids copies.
    content = terms.content(heads.q)
    rows = TokenRows(*(x.transpose(1, 2).flatten(0, 2) for x in (heads.q, content, heads.k, heads.v)))
    pairs = max_elements(heads.q, terms) * BLOCK * window // terms.size(BLOCK, window)
    groups = tiles(intervals, max(1, pairs), rows.q, rows.k, shared=False)
    shape = heads.q.shape[:3], heads.k.shape[2]
    parts = [(tile.to_queries, tile_attention(rows, _pair_tiles(tile, *shape), terms)[0]) for tile in groups]
    out = heads.q.new_zeros(len(rows.q) + 1, heads.v.shape[3])  # the last row is for padding
    if parts:
        places, outputs = zip(*parts)
        out = out.index_copy(0, torch.cat(places), torch.cat([x.flatten(0, 1) for x in outputs]))
    return out[:-1].view(heads.q.shape[0], heads.q.shape[2], heads.q.shape[1], -1).transpose(1, 2)


def _pair_tiles(tile: Tiles, queries: torch.Size, keys: int) -> PairTiles:
    """Return the tiles of one size, of queries [B, H, Tq] and `keys` keys per head."""
    _, heads, length = queries
    count = len(tile.real)
    query, key = tile.queries.view(count, -1), tile.keys.view(count, -1)
    first = query[:, :1].unsqueeze(-1)
    q_idx, slots = query // heads % length, key // heads % keys
    pairs = Pairs(first // heads // length, first % heads, q_idx.unsqueeze(-1), slots.unsqueeze(1))

    def allowed() -> Tensor:
        seen = (tile.real > 0).expand(tile.shape)
        for limit, edge in tile.limits:
            seen = seen & limit(tile.place, edge)
        return seen

    return PairTiles(query, key, pairs, allowed)
