"""ETC's relative labels: each relation between two tokens of [global; long] has a learned vector.

    score_ij = q_i . k_j * scale + q_i . a_l(i,j) / sqrt(D)        k = max_distance

    l(i, j) =   i        j        labels
                long     long     the distance, clipped to -k .. k
                global   global   the distance, clipped to -k .. k, other vectors
                long     global   j represents the sentence of i, or it does not
                global   long     j is in the sentence of i, or it is not

The first `global_tokens` positions of a document are the global tokens. The sentences are `segment_ids`;
without them the document is a single sentence. Labels are computed from positions and segments together with
each score, so no tensor of size Tq x Tk is allocated. The terms of a query with all 4 k + 6 labels are a
single product [B, H, Tq, 4 k + 6].

The scheme adds no other positions. Ainslie et al. 2020, section 3; it follows Shaw et al. 2018 without the
terms in the values. Each head of each layer has separate vectors, and global queries have other vectors than
long queries, as in the released models. The bias per label of these models is part of the bias of the query
projection here.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class EtcLabelsConfig(PositionConfig):
    """ETC labels: learned vectors for distances and for relations of global and long tokens.

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
