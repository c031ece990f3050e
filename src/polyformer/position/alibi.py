"""ALiBi: a negative bias on the score, linear in the distance, with a slope of each head's own.

    score_ij = q_i . k_j / sqrt(D) - slope_h |i - j|

No parameters; slopes are a geometric series from 2^(-8/H), in which heads of other numbers than powers of
two take every second one of the series twice as long. A causal stack sees distances of 0 and more; in an
encoder the bias is the same on both sides (the symmetric form, which the paper leaves open).
Press et al. 2022, section 3.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.dot_product.relative import Relative
from polyformer.position.base import Position, PositionConfig, Shape, Site
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlibiConfig(PositionConfig):
    """Linear biases."""

    kind: ClassVar[str] = "alibi"
    paper: ClassVar[str] = "Press et al. 2022 (ALiBi), section 3"

    def build(self, shape: Shape) -> "Alibi":
        """The module of the scheme, for a whole stack."""
        return Alibi(shape.num_heads)


class Alibi(Position):
    """Biases [H, R] over the distances of a call."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.slopes = slopes(num_heads)

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """bias[h, d] = -slope_h |d|."""
        return context.once(("alibi", self, q.dtype, q.device), lambda: self._biases(q, context))

    def _biases(self, q: Tensor, context: Context) -> Relative:
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device, dtype=q.dtype).abs()
        slopes = torch.tensor(self.slopes, device=q.device, dtype=q.dtype)
        return Relative(first=least, bias=-slopes.unsqueeze(1) * distance)


def slopes(heads: int) -> list[float]:
    """The slope of each head: 2^(-8/H), 2^(-16/H), ... for a power of two."""
    whole = 2 ** math.floor(math.log2(heads))
    series = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return series if whole == heads else series + slopes(2 * whole)[::2][: heads - whole]
