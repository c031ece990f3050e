"""Relation labels: the caller labels the relation of each pair of tokens; each label has a learned vector.

    score_ij = q_i . k_j * scale + q_i . a_l(i,j) / sqrt(D)        l = context.relations [B, Tq, Tk]

The heads of a layer share its table [labels, D]. The score of a pair with the label -1 does not change, and
without labels no score does. Any structure is possible: edges of a dependency tree, links of a page, sides of
a table. The scheme adds no other positions, so a model that needs the order of tokens requires labels for
clipped distances (Ainslie et al. 2020, section 3). The terms of a query with all labels are a single product
[B, H, Tq, labels] with a lookup for each pair. The caller provides the labels, of size Tq x Tk.

`relation_bias` is the form without content: a number for each label and head, as in T5, separate per layer.
"""

import dataclasses
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelationLabelsConfig(PositionConfig):
    """Relation labels: queries are multiplied with a learned vector for the label of each pair of tokens."""

    num_labels: PositiveInt = 32

    kind: ClassVar[str] = "relation_labels"
    paper: ClassVar[str] = "Ainslie et al. 2020 (ETC), section 3"

    def build(self, shape: Shape) -> "RelationLabels":
        return RelationLabels(self.num_labels, shape.num_layers, shape.head_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelationBiasConfig(RelationLabelsConfig):
    """Relation bias: a learned number for each label of a pair of tokens, added to its score."""

    kind: ClassVar[str] = "relation_bias"

    def build(self, shape: Shape) -> "RelationBias":
        return RelationBias(self.num_labels, shape.num_layers, shape.num_heads)


class RelationLabels(Position):
    """A table [labels, width] for each layer, shared by its heads."""

    term = "query · vector of the relation"

    def __init__(self, num_labels: int, num_layers: int, width: int):
        super().__init__()
        self.num_relations = num_labels
        self.tables = nn.ModuleList(nn.Embedding(num_labels, width) for _ in range(num_layers))

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod | None:
        """Return a function that computes score + q_i . a_l(i,j) / sqrt(D); label -1 adds nothing."""
        if context.relations is None:
            return None
        terms = self.terms(q, self.get_submodule(f"tables.{site.layer}").get_parameter("weight"))
        # Label -1 reads the column of zeros at the end: no branch per pair.
        terms, labels, none = F.pad(terms, (0, 1)), context.relations, terms.shape[-1]

        @step(self.term)
        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            label = labels[b, q_idx, kv_idx]
            return score + terms[b, h, q_idx, label.where(label >= 0, none)]

        return add

    def terms(self, q: Tensor, table: Tensor) -> Tensor:
        """Return the term of each label in the scores of each query, [B, H, Tq, labels]."""
        # [B, H, Tq, D] @ [D, labels]: one product for all labels, then a lookup per pair.
        return (q * q.shape[-1] ** -0.5) @ table.to(q.dtype).T


class RelationBias(RelationLabels):
    """A table [labels, H] of biases for each layer."""

    term = "bias of the relation"

    def terms(self, q: Tensor, table: Tensor) -> Tensor:
        """Return table[l, h], the same for every query."""
        return table.to(q.dtype).T.unsqueeze(1).expand(*q.shape[:3], -1)
