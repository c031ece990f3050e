"""ALiBi: a negative bias on the score, linear in the distance, with a separate slope per head.

    score_ij = q_i . k_j / sqrt(D) - slope_h |i - j|

ALiBi has no parameters. The slopes are a geometric series that starts at 2^(-8/H). If H is not a power of
two, the remaining heads use every second slope of the series for twice the next lower power of two. A causal
stack sees only distances of 0 and more. In an encoder the bias is the same on both sides (the symmetric form,
which the paper leaves open). `slope_scale` multiplies all slopes: Falcon divides them by sqrt(D).
Press et al. 2022, section 3.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.relative import Relative
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.core.host_values import tensor_on
from polyformer.core.ranges import PositiveFloat
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlibiConfig(PositionConfig):
    """ALiBi: a bias that falls linearly with distance is added to the scores of each head."""

    slope_scale: PositiveFloat = 1.0  # a factor of all slopes

    kind: ClassVar[str] = "alibi"
    paper: ClassVar[str] = "Press et al. 2022 (ALiBi), section 3"

    def build(self, shape: Shape) -> "Alibi":
        return Alibi(shape.num_heads, self.slope_scale)

    @classmethod
    def examples(cls) -> tuple["AlibiConfig", ...]:
        return cls(), cls(slope_scale=0.25)


class Alibi(Position):
    """Biases [H, R] for the R distances of a call."""

    adds_bias = True
    counts_in_cache = True

    def __init__(self, num_heads: int, slope_scale: float = 1.0):
        super().__init__()
        self.slopes = [slope * slope_scale for slope in slopes(num_heads)]

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """Return bias[h, d] = -slope_h |d| for every distance d of the call."""
        # All layers share the biases of a call.
        return context.once(("alibi", self, q.dtype, q.device), lambda: self._biases(q, context))

    def _biases(self, q: Tensor, context: Context) -> Relative:
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device, dtype=q.dtype).abs()
        slopes = tensor_on(self.slopes, q.device, q.dtype)
        return Relative(first=least, bias=-slopes.unsqueeze(1) * distance)


def slopes(heads: int) -> list[float]:
    """Return the slope of each head: 2^(-8/H), 2^(-16/H), ... if H is a power of two."""
    power = 2 ** math.floor(math.log2(heads))
    series = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    # Every second slope of the longer series falls between two slopes of this series: no slope occurs twice.
    return series if power == heads else series + slopes(2 * power)[::2][: heads - power]
