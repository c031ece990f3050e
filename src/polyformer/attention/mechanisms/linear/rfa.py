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
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import Mechanism, MechanismBackend, MechanismConfig, ScoreTerms
from polyformer.attention.mechanisms.linear.context_parallel import packed_size
from polyformer.attention.mechanisms.linear.definition import definition
from polyformer.attention.mechanisms.linear.feature_attention import (
    NO_SCORE_BIAS_REASON,
    LinearState,
    linear_attention,
)
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.attention.mechanisms.linear.inputs import LinearInputs
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.precision import at_least_float32, without_autocast
from polyformer.core.ops.random_directions import RandomDirections
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class RFAConfig(MechanismConfig):
    """Random feature attention: sines and cosines estimate softmax attention in linear time.

    `features`: the number of rows of W; every row gives a sine and a cosine.
    """

    features: PositiveInt = 64
    gated: bool = False
    sigma: PositiveFloat = 1.0  # the first temperature
    orthogonal: bool = False
    redraw_every: PositiveInt | None = None  # training steps; null for never
    floor: NonNegativeFloat = 0.01  # of denominators; 0 for the raw estimate
    backend: MechanismBackend = "auto"  # "definition": all pairs at once

    kind: ClassVar[str] = "rfa"
    paper: ClassVar[str] = "Peng et al. 2021, section 3"
    supports_score_bias: ClassVar[bool] = False
    supports_context_parallel: ClassVar[bool] = True
    reasons: ClassVar[Mapping[str, str]] = {"supports_score_bias": NO_SCORE_BIAS_REASON}
    eager: ClassVar[str] = (
        "features are drawn from a seed that is read, and a Python loop walks over runs of tokens"
    )

    def __post_init__(self) -> None:
        if self.backend == "definition":
            object.__setattr__(self, "supports_context_parallel", False)

    def build(self, num_heads: int, head_size: int) -> "RFA":
        """Return the module, in linear time, or over all pairs with the backend "definition"."""
        return (PlainRFA if self.backend == "definition" else RFA)(self, num_heads, head_size)

    def definition(self) -> "RFAConfig":
        """Return the config that computes all pairs at once."""
        return dataclasses.replace(self, backend="definition")

    def all_gathered_elements(self, heads: int, kv_heads: int, width: int, length: int) -> int:
        """Return the number of elements in the sums over the sine and cosine of every row."""
        return packed_size(heads, width, 2 * self.features)

    def cross(self) -> "RFAConfig":
        """Return this config: features estimate softmax over any keys, the equation does not use slots."""
        return self

    @classmethod
    def examples(cls) -> tuple["RFAConfig", ...]:
        """Return configs with few features, without and with gates."""
        return cls(features=12), cls(features=31, gated=True, orthogonal=True, redraw_every=2)


class RFA(Mechanism):
    """Random feature attention in linear time, with the sums over keys as state (`LinearState`)."""

    def __init__(self, config: RFAConfig, num_heads: int, head_size: int):
        super().__init__()
        self.config = config
        self.directions = RandomDirections(config.features, head_size, config.orthogonal, config.redraw_every)
        self.log_sigma = nn.Parameter(torch.full((num_heads,), config.sigma).log())
        self.gate: Gate | None = Gate(num_heads, head_size) if config.gated else None

    def new_state(self, reserve: int) -> State:
        """Return the sums over no keys; their size does not grow with the number of tokens."""
        return LinearState()

    @guarded
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: ScoreTerms | None,
    ) -> tuple[Tensor, State | None]:
        """Attend by the features of unit queries and keys over sigma, weighted and decayed by the gates."""
        groups = q.shape[1] // k.shape[1]
        queries, keys = at_least_float32(q), at_least_float32(k).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        # 1 / sigma; learning the logarithm keeps sigma positive.
        factor = at_least_float32(self.log_sigma).to(queries.dtype).neg().exp().view(-1, 1, 1)
        unit_q, unit_k = (F.normalize(x, dim=-1) * factor for x in (queries, keys))
        weight, decay = (None, None) if self.gate is None else self.gate(keys)
        y, state = self._attend(unit_q, unit_k, v, context, state, weight, decay)
        self.directions.watch(y)
        return y.to(q.dtype), state

    def kernel(self, q: Tensor) -> Kernel:
        """Return the feature map of unit queries and keys over sigma."""
        return Kernel(MAPS["gaussian"], self.directions(q), self.config.floor)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        weight: Tensor | None,
        decay: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        assert isinstance(state, LinearState | None)
        return linear_attention(q, k, v, self.kernel(q), context, state, weight, decay)


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


@dataclasses.dataclass(frozen=True)
class GatedCache(State):
    """All keys and values, and the gates of the keys [B, H, T], if any."""

    cache: KeyValueCache
    weight: Tensor | None = None
    decay: Tensor | None = None


class PlainRFA(RFA):
    """Random feature attention by its equation (`definition`), with keys, values and gates as state."""

    def new_state(self, reserve: int) -> State:
        """Return an empty KV cache without gates."""
        return GatedCache(KeyValueCache(reserve=reserve))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        weight: Tensor | None,
        decay: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        if state is not None:
            assert isinstance(state, GatedCache)
            k, v, cache = state.cache.append(k, v)
            if (
                weight is not None
                and decay is not None
                and state.weight is not None
                and state.decay is not None
            ):
                weight, decay = torch.cat([state.weight, weight], 2), torch.cat([state.decay, decay], 2)
            state = GatedCache(cache, weight, decay)
        with without_autocast(q):
            inputs = LinearInputs.of(q, k, v, self.kernel(q), context, weight, decay)
            return definition(inputs, context), state
