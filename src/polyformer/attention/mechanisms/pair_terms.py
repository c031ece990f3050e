"""The terms of a position scheme, for pairs that a mechanism selects tile by tile, or for all pairs.

    score_ij = mod((q_i . k_j + content_i . position_keys[d] + position_queries[d] . k_j) * scale + bias[d])
    out_i    = sum_j p_ij (v_j + position_values[d])            with the distance d = slot(i) - slot(j)

q_i and k_j are the queries and keys of the mechanism's equation, and `mod` is the scheme's score function.
`attend` relies on diagonals of equal distance; sorted or compressed keys have none, so entries are looked up
pair by pair. Memory and time are proportional to the number of pairs: if a table has few entries compared
with the keys of a query, one product with all entries and a lookup of scalars; otherwise a vector is read for
each pair.

`tile_attention` is softmax attention in such tiles: y_i = sum_j p_ij (v_j + position_values[d]) over the keys
of a tile that are allowed for i. Its backward pass recomputes each tile (activation checkpointing), so that
only inputs and outputs are saved. The definitions of mechanisms add the terms of all pairs with `add_terms`
and `weighted_values`.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import PositionTerms
from polyformer.attention.patterns.base import ScoreMod
from polyformer.core.ops.layers import dropout
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context

MAX_TABLE_RATIO = 8
"""A product with all entries, up to this many times the needed ones, is as fast as reading vectors per pair.

Measured: 46 nanoseconds per pair with 32 times more entries of 64 numbers, 16 nanoseconds by reading them.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """The queries and keys in n tiles of Q queries and L keys.

    Args:
        b, h: [n, 1, 1], the row and head of each tile.
        q_idx: [n, Q, 1], the queries, counted in the call.
        kv_idx: [n, 1, L], the slots of the keys.
    """

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class PairTerms:
    """A position scheme's terms for a call.

    `relative`: tables by distance; distances beyond the ends of a table use its first or last entry.
    """

    context: Context
    scale: float
    relative: Relative | None
    score_mod: ScoreMod | None

    @classmethod
    def of(
        cls, position: PositionTerms, q: Tensor, k: Tensor, context: Context, scale: float
    ) -> "PairTerms | None":
        """Return the scheme's terms for q [B, H, Tq, D] and all keys k [B, H, Tk, D]; None without terms."""
        if position is None:
            return None
        far = position.farthest
        # Farther distances share an entry, so that the tables of a long text stay short.
        near = context if far is None else context.within_distances((-far, far))
        relative, score_mod = position.relative(q, k, near), position.score_mod(q, k, context)
        if relative is None and score_mod is None:
            return None
        if relative is not None:
            relative = relative.to(torch.promote_types(q.dtype, torch.float32))
            rows = {name: table.contiguous() for name, table in relative.tables.items()}  # for lookups
            relative = dataclasses.replace(relative, **rows)
        return cls(context, scale, relative, score_mod)

    @property
    def has_vectors(self) -> bool:
        """True if vectors are combined with queries, keys or outputs, not only scalars with the scores."""
        return self.relative is not None and self.relative.tables.keys() != {"bias"}

    def content(self, q: Tensor) -> Tensor:
        """Return the vectors [B, H, Tq, D] that are multiplied with the position keys, q by default."""
        if self.relative is None or self.relative.content is None:
            return q
        return self.relative.content

    def scores(self, scores: Tensor, pairs: Pairs, content: Tensor, keys: Tensor) -> Tensor:
        """Return scores [n, Q, L] with all terms added.

        scores: already scaled. content: [n, Q, D], keys: [n, L, D].
        """
        relative = self.relative
        if relative is not None:
            entry = self._entry(relative, pairs)
            if relative.position_keys is not None:
                scores = scores + _vector_terms(content * self.scale, relative.position_keys, pairs.h, entry)
            if relative.position_queries is not None:
                by_key = _vector_terms(keys * self.scale, relative.position_queries, pairs.h, entry.mT)
                scores = scores + by_key.mT
            if relative.bias is not None:
                scores = scores + _table_rows(relative.bias, pairs.h, entry)
        if self.score_mod is None:
            return scores
        # The score function comes after all terms, as in `attend`.
        return self.score_mod(scores, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx).expand_as(scores)

    def values(self, weights: Tensor, pairs: Pairs) -> Tensor | None:
        """Return sum_j p_ij position_values[d] [n, Q, Dv] for weights [n, Q, L]; None without values."""
        if self.relative is None or self.relative.position_values is None:
            return None
        table, entry = self.relative.position_values, self._entry(self.relative, pairs)
        if table.shape[1] > MAX_TABLE_RATIO * weights.shape[2]:
            return (weights.unsqueeze(-1) * _table_rows(table, pairs.h, entry)).sum(-2)
        # Sum the weights of each entry first: one product with the table instead of a vector per pair.
        mass = weights.new_zeros(*weights.shape[:2], table.shape[1])
        return mass.scatter_add(-1, entry.long(), weights) @ _tile_tables(table, pairs.h)

    def size(self, queries: int, keys: int) -> int:
        """Return the number of elements of the largest intermediate tensor for a tile of this size."""
        sizes = [queries * keys]
        tables = {} if self.relative is None else self.relative.tables
        for name, table in tables.items():
            if name == "bias":
                continue
            rows, others = (keys, queries) if name == "position_queries" else (queries, keys)
            count, width = table.shape[1:]
            sizes.append(
                count * (rows + width) if count <= MAX_TABLE_RATIO * others else queries * keys * width
            )
        return max(sizes)

    def _entry(self, relative: Relative, pairs: Pairs) -> Tensor:
        """Return the table index of each pair's distance, [n, Q, L], in 32-bit integers to save memory."""
        return relative.entry(self.context.distance(pairs.q_idx.int(), pairs.kv_idx.int()))


def _vector_terms(vectors: Tensor, table: Tensor, h: Tensor, entry: Tensor) -> Tensor:
    """Return vectors [n, M, D] . table[h, entry], [n, M, K], for entries of a table [H or 1, R, D]."""
    if table.shape[1] <= MAX_TABLE_RATIO * entry.shape[2]:
        return (vectors @ _tile_tables(table, h).mT).gather(-1, entry.long())
    # Batched matrix-vector products are slower than a product and a sum.
    return (_table_rows(table, h, entry) * vectors.unsqueeze(-2)).sum(-1)


def _tile_tables(table: Tensor, h: Tensor) -> Tensor:
    """Return each tile's table, [n or 1, R, D]."""
    return table if len(table) == 1 else table.index_select(0, h.flatten())


def _table_rows(table: Tensor, h: Tensor, entry: Tensor) -> Tensor:
    """Return table[h, entry], [n, M, K] or [n, M, K, D], of a table [H or 1, R] or [H or 1, R, D]."""
    # An index into the tables of all heads, concatenated, so that one `index_select` reads them.
    place = entry if len(table) == 1 else entry + h.int() * table.shape[1]
    return table.flatten(0, 1).index_select(0, place.flatten()).view(*entry.shape, *table.shape[2:])


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

    def run(q: Tensor, content: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # [n, Q, D] for queries, [n, L, D] for keys.
        queries, content = (_gather_rows(x, tiles.queries) for x in (q, content))
        keys, values = (_gather_rows(x, tiles.keys) for x in (k, v))
        scores = terms.scores(queries @ keys.mT * terms.scale, tiles.pairs, content, keys)
        allowed = tiles.allowed()
        weights, lse = softmax(scores, allowed)
        weights = dropout(weights, dropped)
        out, more = weights @ values, terms.values(weights, tiles.pairs)
        return out if more is None else out + more, lse, allowed.any(-1)

    tensors = rows.q, rows.content, rows.k, rows.v
    if not torch.is_grad_enabled():
        return run(*tensors)
    # Only dropout requires the random state of the forward pass when a tile is recomputed. `checkpoint` keeps
    # the states of the devices of its arguments only.
    return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=dropped > 0)  # type: ignore[return-value]


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


def add_terms(
    scores: Tensor, q: Tensor, k: Tensor, terms: PairTerms | None, slots: Tensor | None = None
) -> Tensor:
    """Return scaled scores [B, H, Tq, Tk] of q [B, H, Tq, D] and k [B, H, Tk, D] with the terms of a scheme.

    slots: [B, Tk], the slots of the keys; by default key j has slot j.
    """
    if terms is None:
        return scores
    b, h, q_idx, kv_idx = _indices(scores, slots)
    relative = terms.relative
    if relative is not None:
        entry = relative.entry(terms.context.distance(q_idx, kv_idx)).expand(scores.shape)
        if relative.position_keys is not None:
            by_query = terms.content(q) @ relative.position_keys.mT  # [B, H, Tq, R]
            scores = scores + by_query.gather(-1, entry) * terms.scale
        if relative.position_queries is not None:
            by_key = k @ relative.position_queries.mT  # [B, H, Tk, R]
            scores = scores + by_key.gather(-1, entry.mT).mT * terms.scale
        if relative.bias is not None:
            scores = scores + relative.bias.expand(scores.shape[1], -1)[h, entry]
    return scores if terms.score_mod is None else terms.score_mod(scores, b, h, q_idx, kv_idx)


def weighted_values(
    weights: Tensor, v: Tensor, terms: PairTerms | None, slots: Tensor | None = None
) -> Tensor:
    """Return sum_j p_ij (v_j + position_values[d]) for weights [B, H, Tq, Tk] and v [B, H, Tk, Dv].

    slots: as in `add_terms`.
    """
    out = weights @ v
    if terms is None or terms.relative is None or terms.relative.position_values is None:
        return out
    _, _, q_idx, kv_idx = _indices(weights, slots)
    table = terms.relative.position_values
    entry = terms.relative.entry(terms.context.distance(q_idx, kv_idx)).expand(weights.shape)
    # Sum the weights of each distance, then multiply by the table: no [Tq, Tk, Dv] tensor.
    mass = weights.new_zeros(*weights.shape[:3], table.shape[1]).scatter_add(-1, entry, weights)
    return out + mass @ table


def _indices(scores: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [Tq, 1] and the keys' slots, [Tk] or [B, 1, 1, Tk]."""
    b, h, i, j = (torch.arange(size, device=scores.device) for size in scores.shape)
    kv_idx = j if slots is None else slots[:, None, None]
    return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.unsqueeze(1), kv_idx
