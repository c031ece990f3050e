"""What a position scheme does to the pairs of queries and keys that a mechanism chose, tile by tile.

    score_ij = mod((q_i . k_j + content_i . position_keys[d] + position_queries[d] . k_j) * scale + bias[d])
    out_i    = sum_j p_ij (v_j + position_values[d])            with the distance d = slot(i) - slot(j)

q_i and k_j are those of the mechanism's own equation, and `mod` the scheme's function of scores. In sorted or
compressed keys no diagonal shares a distance (that is what `attend` makes use of), so entries are looked up
pair by pair. Memory and time are of the order of the pairs: where a table has few entries beside the keys of
a query, one product with all of them and a lookup of numbers; else a vector is read for each pair.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.base import ScoreTerms
from polyformer.dot_product.relative import Relative
from polyformer.patterns.base import ScoreMod
from polyformer.sequence.context import Context

FEW = 8
"""A product with so many times more entries than are needed takes no longer than to read vectors pair by
pair: measured, 46 nanoseconds a pair with 32 times as many of 64 numbers, 16 by reading them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Who meets whom in n tiles of Q queries and L keys.

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
    """A scheme's terms for one call. relative: over distances beyond whose ends all are as at the ends."""

    context: Context
    scale: float
    relative: Relative | None
    score_mod: ScoreMod | None

    @classmethod
    def of(
        cls, position: ScoreTerms | None, q: Tensor, k: Tensor, context: Context, scale: float
    ) -> "PairTerms | None":
        """What the scheme says of queries q [B, H, Tq, D] and all keys k [B, H, Tk, D]; None for nothing."""
        if position is None:
            return None
        far = position.farthest
        near = context if far is None else context.within_distances((-far, far))
        relative, score_mod = position.relative(q, k, near), position.score_mod(q, k, context)
        if relative is None and score_mod is None:
            return None
        if relative is not None:
            relative = relative.to(torch.promote_types(q.dtype, torch.float32))
            rows = {name: table.contiguous() for name, table in relative.tables.items()}  # read one by one
            relative = dataclasses.replace(relative, **rows)
        return cls(context, scale, relative, score_mod)

    @property
    def has_vectors(self) -> bool:
        """Whether vectors meet queries, keys or outputs, and not numbers the scores alone."""
        return self.relative is not None and self.relative.tables.keys() != {"bias"}

    def content(self, q: Tensor) -> Tensor:
        """What meets the position keys: [B, H, Tq, D] as q is, which it is by default."""
        if self.relative is None or self.relative.content is None:
            return q
        return self.relative.content

    def scores(self, scores: Tensor, pairs: Pairs, content: Tensor, keys: Tensor) -> Tensor:
        """Scores [n, Q, L] with all terms, from scaled ones; content [n, Q, D], keys [n, L, D]."""
        relative = self.relative
        if relative is not None:
            entry = self._entry(relative, pairs)
            if relative.position_keys is not None:
                scores = scores + _met(content * self.scale, relative.position_keys, pairs.h, entry)
            if relative.position_queries is not None:
                by_key = _met(keys * self.scale, relative.position_queries, pairs.h, entry.mT)
                scores = scores + by_key.mT
            if relative.bias is not None:
                scores = scores + _rows(relative.bias, pairs.h, entry)
        if self.score_mod is None:
            return scores
        return self.score_mod(scores, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx).expand_as(scores)

    def values(self, weights: Tensor, pairs: Pairs) -> Tensor | None:
        """sum_j p_ij position_values[d] of weights [n, Q, L]: [n, Q, Dv]; None where there is none."""
        if self.relative is None or self.relative.position_values is None:
            return None
        table, entry = self.relative.position_values, self._entry(self.relative, pairs)
        if table.shape[1] > FEW * weights.shape[2]:
            return (weights.unsqueeze(-1) * _rows(table, pairs.h, entry)).sum(-2)
        mass = weights.new_zeros(*weights.shape[:2], table.shape[1])
        return mass.scatter_add(-1, entry.long(), weights) @ _own(table, pairs.h)

    def size(self, queries: int, keys: int) -> int:
        """How many numbers are made at once for a tile of so many queries and keys."""
        sizes = [queries * keys]
        tables = {} if self.relative is None else self.relative.tables
        for name, table in tables.items():
            if name == "bias":
                continue
            met, others = (keys, queries) if name == "position_queries" else (queries, keys)
            count, width = table.shape[1:]
            sizes.append(count * (met + width) if count <= FEW * others else queries * keys * width)
        return max(sizes)

    def _entry(self, relative: Relative, pairs: Pairs) -> Tensor:
        """Where the tables hold the pairs' distances, [n, Q, L], in numbers half as long as usual indices."""
        return relative.entry(self.context.distance(pairs.q_idx.int(), pairs.kv_idx.int()))


def _met(vectors: Tensor, table: Tensor, h: Tensor, entry: Tensor) -> Tensor:
    """vectors [n, M, D] . table[h, entry]: [n, M, K] of entries [n, M, K] of a table [H or 1, R, D]."""
    if table.shape[1] <= FEW * entry.shape[2]:
        return (vectors @ _own(table, h).mT).gather(-1, entry.long())
    # Products of a matrix with one vector each are slower than multiplying and adding up.
    return (_rows(table, h, entry) * vectors.unsqueeze(-2)).sum(-1)


def _own(table: Tensor, h: Tensor) -> Tensor:
    """Each tile's table, [n or 1, R, D]."""
    return table if len(table) == 1 else table.index_select(0, h.flatten())


def _rows(table: Tensor, h: Tensor, entry: Tensor) -> Tensor:
    """table[h, entry] of a table [H or 1, R] or [H or 1, R, D]: [n, M, K] or [n, M, K, D]."""
    place = entry if len(table) == 1 else entry + h.int() * table.shape[1]
    return table.flatten(0, 1).index_select(0, place.flatten()).view(*entry.shape, *table.shape[2:])
