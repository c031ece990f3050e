"""Random feature attention: trigonometric features of unit queries and keys, with or without gates.

    phi(x) = [sin(W x / sigma), cos(W x / sigma)] / sqrt(M)        x = q / |q| or k / |k|
    S_t = S_(t-1) + v_t phi(k_t)^T      z_t = z_(t-1) + phi(k_t)      y_t = S_t phi(q_t) / (z_t . phi(q_t))

This estimates softmax attention with the scores q . k / sigma^2 of unit vectors, because E[phi(q) . phi(k)] =
exp(-|q - k|^2 / (2 sigma^2)), and all lengths are equal. The temperature sigma is learned per head. The gated
form forgets: S_t = g_t S_(t-1) + (1 - g_t) v_t phi(k_t)^T, z_t likewise, with g_t = sigmoid(u_h . k_t + b_h)
for head h. Without causality all queries use the sums over all keys. Peng et al. 2021, sections 3.1 and 3.2,
appendix A.2.

Deviations: the paper's gate reads the layer's input; here it reads the key, since a mechanism gets only
projections. Without causality, where the paper has no gates, they only weigh keys by 1 - g. sigma is a scalar
per head. An estimate may be near 0 or negative: denominators are raised to at least `floor` times the sum of
weights. The heads of a layer share W. Costs: see `feature_attention`, with 2 M numbers for M features.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import Heads, PositionTerms
from polyformer.attention.mechanisms.linear.feature_attention import (
    RandomFeatureAttention,
    RandomFeaturesConfig,
)
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ranges import PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class RFAConfig(RandomFeaturesConfig):
    """Random feature attention: sines and cosines estimate softmax attention in linear time.

    `features`: the number of rows of W; every row gives a sine and a cosine.
    """

    features: PositiveInt = 64
    gated: bool = False
    sigma: PositiveFloat = 1.0  # the first temperature
    orthogonal: bool = False
    redraw_every: PositiveInt | None = None

    kind: ClassVar[str] = "rfa"
    paper: ClassVar[str] = "Peng et al. 2021, section 3"

    @property
    def width(self) -> int:
        """Return the number of features of a vector: a sine and a cosine per row."""
        return 2 * self.features

    def build(self, num_heads: int, head_size: int) -> "RFA":
        """Return the module with a temperature per head, and with gates if `gated`."""
        return RFA(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["RFAConfig", ...]:
        """Return configs with few features, without and with gates."""
        return cls(features=12), cls(features=31, gated=True, orthogonal=True, redraw_every=2)


class RFA(RandomFeatureAttention):
    """Attention by the features of unit queries and keys over sigma, weighted and decayed by the gates."""

    config: RFAConfig

    def __init__(self, config: RFAConfig, num_heads: int, head_size: int):
        super().__init__(config, head_size)
        # The logarithm is learned, so that sigma stays positive.
        self.log_sigma = nn.Parameter(torch.full((num_heads,), config.sigma).log())
        self.gate: Gate | None = Gate(num_heads, head_size) if config.gated else None

    def kernel(self, q: Tensor) -> Kernel:
        """Return the feature map of unit queries and keys over sigma."""
        return Kernel(MAPS["gaussian"], self.directions(q), self.config.floor)

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Attend by phi(q / (|q| sigma)) and phi(k / (|k| sigma))."""
        groups = q.shape[1] // k.shape[1]
        queries, keys = at_least_float32(q), at_least_float32(k).repeat_interleave(groups, dim=1)
        factor = at_least_float32(self.log_sigma).to(queries.dtype).neg().exp().view(-1, 1, 1)  # 1 / sigma
        unit_q, unit_k = (F.normalize(x, dim=-1) * factor for x in (queries, keys))
        gates = () if self.gate is None else self.gate(keys)
        heads = Heads(unit_q, unit_k, v.repeat_interleave(groups, dim=1))
        y, state = self.attend(heads, context, state, *gates)
        return y.to(q.dtype), state


class Gate(nn.Module):
    """g = sigmoid(u_h . k + b_h): keys [B, H, T, D] -> log(1 - g) and log g, [B, H, T] each."""

    def __init__(self, num_heads: int, head_size: int):
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(num_heads, head_size))
        # sigmoid(3) = 0.95, so that heads initially forget slowly.
        self.bias = nn.Parameter(torch.full((num_heads,), 3.0))

    def forward(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(1 - g), the log weight of each key, and log g, the log decay before it."""
        vector, bias = (x.to(k.dtype) for x in (self.vector, self.bias))
        logit = (k * vector.unsqueeze(1)).sum(-1) + bias.unsqueeze(-1)
        return F.logsigmoid(-logit), F.logsigmoid(logit)
