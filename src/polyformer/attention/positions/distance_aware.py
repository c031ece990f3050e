"""DA-Transformer: scores are clipped at zero and rescaled by a learned function of the distance.

    p_ij = softmax_j(ReLU(q_i . k_j) f(w |i - j|) / sqrt(D))
    f(R) = (1 + e^b) / (1 + e^(b - R))              w and b of each head, in each layer

f is monotone and 1 at distance 0. It ranges from 0 (R to minus infinity: w < 0, a head that prefers near
keys) to 1 + e^b (R to infinity: w > 0, a head that prefers far keys). w and b start at 0, where f is 1
everywhere. The cost is a few operations per score and no memory. Wu et al. 2021, section 3.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import ChainedScoreMods, step
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceAwareConfig(PositionConfig):
    """DA-Transformer positions: a learned function of distance rescales clipped scores."""

    kind: ClassVar[str] = "da"
    paper: ClassVar[str] = "Wu et al. 2021 (DA-Transformer), section 3"

    def build(self, shape: Shape) -> "DistanceAware":
        return DistanceAware(shape.num_layers, shape.num_heads)


class DistanceAware(Position):
    """Parameters w and b [layers, H] of the rescaling function."""

    def __init__(self, num_layers: int, num_heads: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_layers, num_heads))
        self.b = nn.Parameter(torch.zeros(num_layers, num_heads))

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod:
        """Return a function that computes relu(score) f(w_h |i - j|)."""
        dtype = torch.promote_types(self.w.dtype, torch.float32)  # scores are never in half precision
        w, b = (table[site.layer].to(dtype) for table in (self.w, self.b))

        @step("clipped at zero: ReLU")
        @broadcasts
        def clip(score: Tensor, row: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score.relu()

        @step("rescaled by distance: times f(w |i - j|)")
        @broadcasts
        def rescale(score: Tensor, row: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = context.distance(q_idx, kv_idx).abs()
            return score * rescaling(w[h] * distance, b[h])

        return ChainedScoreMods((clip, rescale))


def rescaling(distance: Tensor, b: Tensor) -> Tensor:
    """Return f(R) = (1 + e^b) / (1 + e^(b - R)), computed for each pair: faster than a lookup by distance."""
    b = b.clamp(max=80)  # e^b overflows for greater b; f is then e^R to the precision of float32
    return (distance - b).sigmoid() * (1 + b.exp())
