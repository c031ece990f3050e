"""Differential attention: the difference of two attention maps cancels weight on irrelevant tokens.

    y = (1 - lambda_0) norm((softmax(q k^T / sqrt(D)) - lambda softmax(q' k'^T / sqrt(D))) [v, v'])
    lambda = exp(a . b) - exp(a' . b') + lambda_0      lambda_0 = 0.8 - 0.6 exp(-0.3 l) in layer l = 0, 1, ...

The prime denotes head i + H / 2 next to head i: both attend to the same values of width 2 D. `norm` is an RMS
norm of each pair's output. The vectors a, b, a', b' [D] and the weight of the norm [2 D] are shared by all
pairs of a layer. A position scheme's vectors of values, such as Shaw's, are added to both v and v'. Ye et al.
2024, section 2.1.

Deviation: none; the authors' code pairs heads 2 i and 2 i + 1, which only permutes the rows of projections.
Cost: 2 Tq Tk (D + 2 D) products per head, half as many more as softmax attention.
"""

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import DelegatedTerms, MechanismConfig, PositionTerms
from polyformer.attention.mechanisms.cached import CachedAttention
from polyformer.core.kv_cache import appended
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ranges import Probability, UnitFloat
from polyformer.core.sequence.context import Context
from polyformer.core.state import State

EPS = 1e-5
"""Of the norm, as in the authors' code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifferentialConfig(MechanismConfig):
    """Differential attention: a pair of heads subtracts two attention maps of the same values.

    `initial`: the first factor of the second map; by default it grows with the layer from 0.2 to 0.8.
    """

    initial: UnitFloat | None = None
    dropout: Probability = 0.0  # of the weights of both maps
    backend: str = "auto"

    kind: ClassVar[str] = "differential"
    paper: ClassVar[str] = "Ye et al. 2024 (Differential Transformer), section 2.1"
    supports_part_rotations: ClassVar[bool] = True
    supports_recurrence: ClassVar[bool] = True
    separate_queries: ClassVar[bool] = True
    head_multiple: ClassVar[int] = 2

    def for_layer(self, layer: int) -> "DifferentialConfig":
        """Return the config with the first factor of layer `layer`."""
        if self.initial is not None:
            return self
        return dataclasses.replace(self, initial=0.8 - 0.6 * math.exp(-0.3 * layer))

    def build(self, num_heads: int, head_size: int) -> "Differential":
        return Differential(self.for_layer(0), head_size)


class Differential(CachedAttention):
    """The difference of two softmax maps for each pair of heads, and a KV cache as state."""

    def __init__(self, config: DifferentialConfig, head_size: int):
        super().__init__()
        self.config = config
        # a, b, a', b'; their scale is the authors'.
        self.factors = nn.Parameter(torch.randn(4, head_size) * 0.1)
        self.norm_weight = nn.Parameter(torch.ones(2 * head_size))

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return the normalised differences of both maps [B, H, Tq, D], and the next cache."""
        k, v, state = appended(state, k, v)
        # Heads i and i + H / 2 read the values of both: [B, Hkv, Tk, 2 D].
        values = torch.cat(v.chunk(2, 1), -1).repeat(1, 2, 1, 1)
        terms = None if position is None else PairedTerms(position)
        first, second = self.attend(q, k, values, context, terms).chunk(2, 1)
        difference = at_least_float32(first) - self.factor() * at_least_float32(second)
        weight = (1 - self.config.initial) * self.norm_weight.to(difference.dtype)
        y = F.rms_norm(difference, weight.shape, weight, EPS)  # [B, H / 2, Tq, 2 D]
        return torch.cat(y.chunk(2, -1), 1).to(q.dtype), state

    def factor(self) -> Tensor:
        """Return lambda, the factor of the second map."""
        a, b, other_a, other_b = at_least_float32(self.factors)
        return (a * b).sum().exp() - (other_a * other_b).sum().exp() + self.config.initial


@dataclasses.dataclass(frozen=True, eq=False)
class PairedTerms(DelegatedTerms):
    """The terms of a scheme for heads that read the values of a pair, [v, v'] of width 2 D."""

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return the scheme's terms by distance, with position values [H or 1, R, 2 D]."""
        relative = self.position.relative(q, k, context)
        if relative is None or relative.position_values is None:
            return relative
        values = relative.position_values
        # One table for all heads, or one per head: heads i and i + H / 2 read the vectors of both.
        halves = (values, values) if len(values) == 1 else values.chunk(2)
        paired = torch.cat(halves, -1)
        paired = paired if len(values) == 1 else paired.repeat(2, 1, 1)
        return dataclasses.replace(relative, position_values=paired)
