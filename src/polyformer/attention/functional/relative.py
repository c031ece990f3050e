"""Relative terms: biases and vectors that depend only on the distance between a query and a key.

    score_ij = (q_i . k_j + content_i . position_keys[d] + position_queries[d] . k_j) * scale + bias[d]
    out_i    = sum_j p_ij (v_j + position_values[d])            with the distance d = slot(i) - slot(j)

The terms are tables over distances instead of a function of scores, so that a backend can use their
structure: all scores on a diagonal share an entry, and the lookups of a tile are a view of a matrix product.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.patterns.base import ScoreMod
from polyformer.core.errors import InputError
from polyformer.core.modules import names_wrong_fields
from polyformer.core.sequence.context import Context

TABLES = "bias", "position_keys", "position_queries", "position_values"
"""The fields with an entry for each distance."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Relative:
    """Tables over the distances `first`, `first` + 1, ..., for each of H heads, or 1 for all heads together.

    Args:
        first: the distance of entry 0; negative if keys may come after their query.
        bias: [H or 1, R], added to the scaled scores.
        position_keys: [H or 1, R, D], multiplied with `content`.
        content: [B, H, Tq, D], multiplied with `position_keys`; by default the queries themselves.
        position_queries: [H or 1, R, D], multiplied with the keys.
        position_values: [H or 1, R, Dv], added to the values.
    """

    first: int
    bias: Tensor | None = None
    position_keys: Tensor | None = None
    content: Tensor | None = None
    position_queries: Tensor | None = None
    position_values: Tensor | None = None

    @names_wrong_fields
    def __post_init__(self) -> None:
        lengths = [table.shape[1] for table in self.tables.values()]
        if any(length != lengths[0] for length in lengths):
            shapes = {name: tuple(table.shape) for name, table in self.tables.items()}
            raise InputError(f"relative: expected tables over the same distances, got {shapes}")

    @property
    def tables(self) -> dict[str, Tensor]:
        """Return the tables that are not None, by name."""
        return {name: table for name in TABLES if (table := getattr(self, name)) is not None}

    def to(self, dtype: torch.dtype) -> "Relative":
        """Return the same terms in another floating type."""
        changes = {name: table.to(dtype) for name, table in self.tables.items()}
        content = None if self.content is None else self.content.to(dtype)
        return dataclasses.replace(self, content=content, **changes)

    def over(self, first: int, last: int) -> "Relative":
        """Return the same terms over the distances first..last, with zeros for new distances."""
        changes = {}
        for name, table in self.tables.items():
            # Zeros for distances outside the old tables; a negative number cuts entries off.
            before, after = self.first - first, last - (self.first + table.shape[1] - 1)
            widths = (before, after) if table.dim() == 2 else (0, 0, before, after)
            changes[name] = F.pad(table, widths) if before or after else table
        return dataclasses.replace(self, first=first, **changes)

    def plus(self, other: "Relative") -> "Relative":
        """Return the terms of both; only biases may be present in both."""
        ends = [terms.first + next(iter(terms.tables.values())).shape[1] for terms in (self, other)]
        first, last = min(self.first, other.first), max(ends) - 1
        mine, theirs = self.over(first, last), other.over(first, last)
        assert mine.tables.keys() & theirs.tables.keys() <= {"bias"}
        tables = {**mine.tables, **theirs.tables}
        if mine.bias is not None and theirs.bias is not None:
            tables["bias"] = mine.bias + theirs.bias
        content = mine.content if theirs.content is None else theirs.content
        return Relative(first=first, content=content, **tables)

    def followed_by(self, other: "Relative") -> "Relative":
        """Return these terms with the entries of the tables of `other` after their own."""
        later = other.tables
        tables = {name: torch.cat([table, later[name]], 1) for name, table in self.tables.items()}
        return dataclasses.replace(self, **tables)

    def select_heads(self, heads: list[int], num_heads: int) -> "Relative":
        """Return the terms of some of `num_heads` heads, in this order."""
        changes = {name: table[heads] for name, table in self.tables.items() if len(table) == num_heads > 1}
        content = None if self.content is None else self.content[:, heads]
        return dataclasses.replace(self, content=content, **changes)

    def score_mod(self, q: Tensor, k: Tensor, scale: float, context: Context) -> ScoreMod:
        """Return the terms as a FlexAttention `score_mod` with lookups in tables [B, H, Tq or Tk, R].

        q: [B, H, Tq, D]; k: [B, H, Tk, D], with the same number of heads as q.
        """
        bias = None if self.bias is None else self.bias.expand(q.shape[1], -1)
        by_query = by_key = None
        # Scale before the product because of the range of float16. Scale the tables instead of the content
        # because onnxruntime 1.31 loses content that is already scaled in `q` and scaled again here.
        if self.position_keys is not None:
            content = q if self.content is None else self.content
            by_query = content @ (self.position_keys * scale).mT
        if self.position_queries is not None:
            by_key = k @ (self.position_queries * scale).mT

        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            entry = self.entry(context.entry_distance(b, q_idx, kv_idx))
            if bias is not None:
                score = score + bias[h, entry]
            if by_query is not None:
                score = score + by_query[b, h, q_idx, entry]
            if by_key is not None:
                score = score + by_key[b, h, kv_idx, entry]
            return score

        return add

    def entry(self, distance: Tensor) -> Tensor:
        """Return the index of a distance in the tables.

        A distance outside the tables belongs to a masked pair and gets an arbitrary valid index.
        """
        length = next(iter(self.tables.values())).shape[1]
        return (distance - self.first).clamp(0, length - 1)

    def values_term(self, probabilities: Tensor, context: Context) -> Tensor:
        """Return sum_j p_ij position_values[d] for probabilities [B, H, Tq, Tk]: [B, H, Tq, Dv]."""
        assert self.position_values is not None
        device = probabilities.device
        q_idx = torch.arange(context.q_len, device=device).view(-1, 1)
        entry = self.entry(context.index_distance(q_idx, torch.arange(context.kv_len, device=device)))
        shape = (*probabilities.shape[:3], self.position_values.shape[1])
        # Sum the probabilities by distance first: no tensor [Tq, Tk, Dv] is needed.
        mass = probabilities.new_zeros(shape).scatter_add(-1, entry.expand_as(probabilities), probabilities)
        return mass @ self.position_values
