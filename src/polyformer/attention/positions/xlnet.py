"""XLNet's positions: Transformer-XL's, and a term for whether two tokens are of one segment.

    score_ij = ((q_i + u) . k_j + (q_i + v) . (W_R R_(i-j)) + (q_i + w) . s_ij) / sqrt(D)

s_ij is s_0 if tokens i and j are of one segment and s_1 if not: two vectors [H, D] of each layer, and no
absolute segment has one. w [H, D] is added to all queries, as u and v are. Without segments all pairs have
s_0, which changes no weight, and the term is left out. Yang et al. 2019, section 2.5.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.positions.base import Shape, Site
from polyformer.attention.positions.transformer_xl import TransformerXL, TransformerXLConfig
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class XLNetConfig(TransformerXLConfig):
    """XLNet positions: Transformer-XL's positions with a term for pairs of tokens of one segment or two."""

    kind: ClassVar[str] = "xlnet"
    paper: ClassVar[str] = "Yang et al. 2019 (XLNet), section 2.5"

    def build(self, shape: Shape) -> "XLNet":
        return XLNet(self, shape)

    @classmethod
    def examples(cls) -> tuple["XLNetConfig", ...]:
        return cls(), cls(shared_biases=True, clamp_distance=5)


class XLNet(TransformerXL):
    """Parameters of Transformer-XL, and w [H, 1, D] and s [2, H, D] of every layer."""

    def __init__(self, config: XLNetConfig, shape: Shape):
        super().__init__(config, shape)
        heads, width = shape.num_heads, shape.head_size
        self.w = nn.ParameterList(nn.Parameter(torch.zeros_like(start)) for start in self.u)
        self.segments = nn.ParameterList(
            nn.Parameter(torch.empty(2, heads, width).normal_(std=width**-0.5))
            for _ in range(shape.num_layers)
        )

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod | None:
        """Return a function that computes score + (q_i + w) . s_ij / sqrt(D); None without segments."""
        if context.q_segment is None:
            return None
        own = site.layer % len(self.u)
        # `rotate` has added u to q.
        content = (q + (self.w[own] - self.u[own]).to(q.dtype)) * q.shape[-1] ** -0.5
        terms = content @ self.segments[site.layer].to(q.dtype).permute(1, 2, 0)  # [B, H, Tq, 2]

        @step("query · vector of the segments")
        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + terms[b, h, q_idx, (~context.same_segment(b, q_idx, kv_idx)).long()]

        return add
