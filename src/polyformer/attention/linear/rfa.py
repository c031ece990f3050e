"""Random feature attention: trigonometric features of unit queries and keys, with gates or without.

    phi(x) = [sin(W x / sigma), cos(W x / sigma)] / sqrt(M)        x = q / |q| or k / |k|
    S_t = S_(t-1) + v_t phi(k_t)^T      z_t = z_(t-1) + phi(k_t)      y_t = S_t phi(q_t) / (z_t . phi(q_t))

which estimates softmax attention with the scores q . k / sigma^2 of unit vectors: E[phi(q) . phi(k)] =
exp(-|q - k|^2 / (2 sigma^2)), and all lengths are alike. The temperature sigma is learned for each head. The
gated form forgets: S_t = g_t S_(t-1) + (1 - g_t) v_t phi(k_t)^T, z_t likewise, with g_t = sigmoid(u_h . k_t +
b_h) for head h. Without causality all queries read the sums over all keys. Peng et al. 2021, sections 3.1 and
3.2, appendix A.2.

Deviations: the paper's gate reads the layer's input; a mechanism sees its projection, the key. Without
causality, where the paper has no gates, they weigh keys by 1 - g alone. sigma is one number a head. An
estimate may be near 0 or below: denominators count as no less than `floor` times the sum of weights. The
heads of a layer share W. Costs: see `feature_attention`, with 2 M numbers for M features.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.base import Mechanism, MechanismConfig, ScoreTerms
from polyformer.attention.linear.definition import definition
from polyformer.attention.linear.feature_attention import NO_DISTANCES, LinearState, linear_attention
from polyformer.attention.linear.feature_maps import MAPS, Kernel, check_features
from polyformer.attention.linear.inputs import Inputs
from polyformer.attention.linear.spread import numbers
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.state import State
from polyformer.dot_product.isolation import guarded
from polyformer.ops.precision import at_least_float32, without_autocast
from polyformer.ops.random_directions import RandomDirections
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class RFAConfig(MechanismConfig):
    """`features`: rows of W, each of which gives a sine and a cosine."""

    features: int = 64
    gated: bool = False
    sigma: float = 1.0  # the first temperature
    orthogonal: bool = False
    redraw_every: int | None = None  # training steps; null for never
    floor: float = 0.01  # of denominators; 0 for the raw estimate
    plain: bool = False  # all pairs at once: the definition

    kind: ClassVar[str] = "rfa"
    paper: ClassVar[str] = "Peng et al. 2021, section 3"
    relates: ClassVar[bool] = False
    spreads: ClassVar[bool] = True
    reasons: ClassVar[Mapping[str, str]] = {"relates": NO_DISTANCES}
    eager: ClassVar[str] = (
        "features are drawn from a number that is read, and runs of tokens walked in Python"
    )

    def __post_init__(self) -> None:
        check_features(self.features, self.redraw_every)
        if self.plain:
            object.__setattr__(self, "spreads", False)
        if self.sigma <= 0:
            raise InputError(f"sigma: expected a temperature above 0, got {self.sigma}")
        if self.floor < 0:
            raise InputError(f"floor: expected 0 or more, got {self.floor}")

    def build(self, num_heads: int, head_size: int) -> "RFA":
        """In linear time, or by all pairs if `plain`."""
        return (PlainRFA if self.plain else RFA)(self, num_heads, head_size)

    def definition(self) -> "RFAConfig":
        """All pairs at once."""
        return dataclasses.replace(self, plain=True)

    def summed(self, heads: int, kv_heads: int, width: int, length: int) -> int:
        """Those of the sine and the cosine of every row."""
        return numbers(heads, width, 2 * self.features)

    def cross(self) -> "RFAConfig":
        """The equation asks nothing of slots: features estimate softmax over any keys."""
        return self

    @classmethod
    def examples(cls) -> tuple["RFAConfig", ...]:
        """Few features, without gates and with them."""
        return cls(features=12), cls(features=31, gated=True, orthogonal=True, redraw_every=2)


class RFA(Mechanism):
    """Its state is the sums over keys, a `LinearState`."""

    def __init__(self, config: RFAConfig, num_heads: int, head_size: int):
        super().__init__()
        self.config = config
        self.directions = RandomDirections(config.features, head_size, config.orthogonal, config.redraw_every)
        self.log_sigma = nn.Parameter(torch.full((num_heads,), config.sigma).log())
        self.gate: Gate | None = Gate(num_heads, head_size) if config.gated else None

    def new_state(self, reserve: int) -> State:
        """Sums over no keys; they take no more room with more tokens."""
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
        """Attention by phi of unit queries and keys over sigma, with the gates' log weights and decays."""
        groups = q.shape[1] // k.shape[1]
        queries, keys = at_least_float32(q), at_least_float32(k).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        factor = at_least_float32(self.log_sigma).to(queries.dtype).neg().exp().view(-1, 1, 1)
        unit_q, unit_k = (F.normalize(x, dim=-1) * factor for x in (queries, keys))
        weight, decay = (None, None) if self.gate is None else self.gate(keys)
        y, state = self._mix(unit_q, unit_k, v, context, state, weight, decay)
        self.directions.watch(y)
        return y.to(q.dtype), state

    def kernel(self, q: Tensor) -> Kernel:
        """The features of unit queries and keys over sigma."""
        return Kernel(MAPS["gaussian"], self.directions(q), self.config.floor)

    def _mix(
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
        self.bias = nn.Parameter(torch.full((num_heads,), 3.0))

    def forward(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - g), the log weight of each key, and log g, the log decay before it."""
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
    """By the equation over all pairs (`definition`); its state is all keys, values and gates."""

    def new_state(self, reserve: int) -> State:
        """A key-value cache and the gates."""
        return GatedCache(KeyValueCache(reserve=reserve))

    def _mix(
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
            inputs = Inputs.of(q, k, v, self.kernel(q), context, weight, decay)
            return definition(inputs, context), state
