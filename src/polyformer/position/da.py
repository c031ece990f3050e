"""DA-Transformer: scores are clipped at zero and rescaled by a learned function of the distance.

    p_ij = softmax_j(ReLU(q_i . k_j) f(w |i - j|) / sqrt(D))
    f(R) = (1 + e^b) / (1 + e^(b - R))              w and b of each head, in each layer

f is monotone, 1 at distance 0, and lies between 0 (R to minus infinity: w < 0, a head that looks near) and
1 + e^b (R to infinity: w > 0, a head that looks far). w and b start at 0, where f is 1 everywhere. One table
[H, distances] a layer. Wu et al. 2021, section 3.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.context import Context
from polyformer.core.pattern import ScoreMod
from polyformer.position.base import Position, PositionConfig, Shape, Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceAwareConfig(PositionConfig):
    """Scores rescaled by distance."""

    kind: ClassVar[str] = "da"
    row: ClassVar[str] = "P8"
    paper: ClassVar[str] = "Wu et al. 2021 (DA-Transformer), section 3"

    def build(self, shape: Shape) -> "DistanceAware":
        return DistanceAware(shape.num_layers, shape.num_heads)


class DistanceAware(Position):
    """w and b, [layers, H]."""

    def __init__(self, num_layers: int, num_heads: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_layers, num_heads))
        self.b = nn.Parameter(torch.zeros(num_layers, num_heads))

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod:
        least, greatest = context.distances
        dtype = torch.promote_types(self.w.dtype, torch.float32)  # scores are never in half precision
        distance = torch.arange(least, greatest + 1, device=q.device, dtype=dtype).abs()
        w, b = (one[site.layer].to(dtype).unsqueeze(1) for one in (self.w, self.b))
        table = rescaling(w * distance, b)

        def rescale(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            entry = (
                context.distance(q_idx, kv_idx).clamp(least, greatest) - least
            )  # what is outside is masked
            return score.relu() * table[h, entry]

        return rescale


def rescaling(distance: Tensor, b: Tensor) -> Tensor:
    """f(R) = (1 + e^b) / (1 + e^(b - R)), without overflow where either power is large."""
    zero = torch.zeros_like(distance)
    return torch.exp(torch.logaddexp(zero, b) - torch.logaddexp(zero, b - distance))
