"""Labels of pairs of tokens: each label l(i, j) has a learned vector or number that is added to the score.

    relation_labels   score_ij = q_i . k_j * scale + q_i . a_l(i,j) / sqrt(D)        l = context.relations
    relation_bias     score_ij = q_i . k_j * scale + table[l(i, j), h]               l = context.relations
    etc_labels        score_ij = q_i . k_j * scale + q_i . a_l(i,j) / sqrt(D)
                      i        j        l(i, j), with k = max_distance
                      long     long     the distance, clipped to -k .. k
                      global   global   the distance, clipped to -k .. k, other vectors
                      long     global   j represents the sentence of i, or it does not
                      global   long     j is in the sentence of i, or it is not

The terms of a query with all labels are a single product [B, H, Tq, labels] with a lookup for each pair. No
scheme of this module adds other positions.
"""

import dataclasses
from typing import ClassVar

import torch
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
    """Relation labels: queries are multiplied with a learned vector for the label of each pair of tokens.

    The caller labels the relation of each pair, in a tensor [B, Tq, Tk]. Any structure is possible: edges of
    a dependency tree, links of a page, sides of a table. The heads of a layer share its table [labels, D].
    The score of a pair with the label -1 does not change, and without labels no score does. A model that
    needs the order of tokens requires labels for clipped distances (Ainslie et al. 2020, section 3).
    """

    num_labels: PositiveInt = 32

    kind: ClassVar[str] = "relation_labels"
    paper: ClassVar[str] = "Ainslie et al. 2020 (ETC), section 3"

    def build(self, shape: Shape) -> "RelationLabels":
        return RelationLabels(self.num_labels, shape.num_layers, shape.head_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelationBiasConfig(RelationLabelsConfig):
    """Relation bias: a learned number for each label of a pair of tokens, added to its score.

    This is the form without content: a number for each label and head, as in T5, separate per layer.
    """

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EtcLabelsConfig(PositionConfig):
    """ETC labels: learned vectors for distances and for relations of global and long tokens.

    The first `global_tokens` positions of a document are the global tokens. The sentences are `segment_ids`;
    without them the document is a single sentence. Labels are computed from positions and segments together
    with each score, so no tensor of size Tq x Tk is allocated. There are 4 k + 6 labels.

    The scheme follows Shaw et al. 2018 without the terms in the values. Each head of each layer has separate
    vectors, and global queries have other vectors than long queries, as in the released models. The bias per
    label of these models is part of the bias of the query projection here.

    `global_tokens` must be the same number as in the pattern `ETC`.
    """

    global_tokens: PositiveInt = 1
    max_distance: PositiveInt = 12  # tokens, from which on all share a label

    kind: ClassVar[str] = "etc_labels"
    paper: ClassVar[str] = "Ainslie et al. 2020 (ETC), section 3"

    def build(self, shape: Shape) -> "EtcLabels":
        return EtcLabels(self, shape)

    @classmethod
    def examples(cls) -> tuple["EtcLabelsConfig", ...]:
        return cls(), cls(global_tokens=3, max_distance=2)


class EtcLabels(Position):
    """A table [4 k + 6, H D] for each layer."""

    def __init__(self, config: EtcLabelsConfig, shape: Shape):
        super().__init__()
        self.config, self.heads = config, shape.num_heads
        count, width = 4 * config.max_distance + 6, shape.num_heads * shape.head_size
        self.tables = nn.ModuleList(nn.Embedding(count, width) for _ in range(shape.num_layers))

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod:
        """Return a function that computes score + q_i . a_l(i,j) / sqrt(D)."""
        table = self.get_submodule(f"tables.{site.layer}").get_parameter("weight").to(q.dtype)
        # [labels, H D] -> [labels, H, D] -> [H, D, labels]
        vectors = table.unflatten(1, (self.heads, -1)).permute(1, 2, 0)
        terms = (q * q.shape[-1] ** -0.5) @ vectors

        @step("query · vector of the label")
        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + terms[b, h, q_idx, self.label(context, b, q_idx, kv_idx)]

        return add

    def label(self, context: Context, b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the label of each pair of query and key; the indices broadcast."""
        most, first = self.config.max_distance, self.config.global_tokens
        query, key = context.query_position(b, q_idx) < first, context.key_position(b, kv_idx) < first
        near = context.distance(q_idx, kv_idx).clamp(-most, most) + most
        # Order of the labels: distances of long pairs, of global pairs, then two labels for each mixed pair.
        alike = near + torch.where(query, 2 * most + 1, 0)
        own = context.same_segment(b, q_idx, kv_idx).long()
        apart = own + torch.where(query, 4 * most + 4, 4 * most + 2)
        return torch.where(query == key, alike, apart)
