"""The terms of a position scheme for the pairs of queries and keys that a mechanism selects, tile by tile.

    score_ij = mod((q_i . k_j + content_i . position_keys[d] + position_queries[d] . k_j) * scale + bias[d])
    out_i    = sum_j p_ij (v_j + position_values[d])            with the distance d = slot(i) - slot(j)

q_i and k_j are the queries and keys of the mechanism's equation, and `mod` is the scheme's score function.
`attend` relies on diagonals of equal distance; sorted or compressed keys have none, so entries are looked up
pair by pair. Memory and time are proportional to the number of pairs: if a table has few entries compared
with the keys of a query, one product with all entries and a lookup of scalars; otherwise a vector is read for
each pair.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import ScoreTerms
from polyformer.attention.patterns.base import ScoreMod
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
        cls, position: ScoreTerms | None, q: Tensor, k: Tensor, context: Context, scale: float
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
