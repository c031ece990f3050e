"""Linear attention by random features: the sums over keys are computed once, or pass from token to token.

    y_i = sum_j w_ij (phi(q_i) . phi(k_j)) v_j / sum_j w_ij (phi(q_i) . phi(k_j))
    w_ij = exp(weight_j + decay_(j+1) + ... + decay_i)        over the keys j that query i attends to

Token by token it is the recurrence S = e^decay S + e^weight v phi(k)^T, z = e^decay z + e^weight phi(k),
y = S phi(q) / (z . phi(q)). Documents in one row are computed one after another. The members differ in phi
and in the weights:

    performer   phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(M)        x' = x / D^(1/4)
                so that E[phi(q) . phi(k)] = exp(q . k / sqrt(D))
    rfa         phi(x) = [sin(W x' / sigma), cos(W x' / sigma)] / sqrt(M)        x' = x / |x|
                so that E[phi(q) . phi(k)] = exp(-|q' - k'|^2 / (2 sigma^2))
                gated: S_t = g_t S_(t-1) + (1 - g_t) v_t phi(k_t)^T        g_t = sigmoid(u_h . k_t + b_h)

Katharopoulos et al. 2020, section 3. Cost: 2 M (D + 2 Dv) products per token and head, plus half a run's
M + Dv in the causal form; the state has M (Dv + 1) numbers per head, independent of the number of tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.plan import refuse_recording
from polyformer.attention.mechanisms.base import (
    Heads,
    Mechanism,
    MechanismBackend,
    MechanismConfig,
    PositionTerms,
)
from polyformer.attention.mechanisms.linear.context_parallel import context_parallel_attention, packed_size
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.attention.mechanisms.linear.passes import (
    attend_causal_documents,
    attend_document,
    attend_noncausal_documents,
)
from polyformer.attention.mechanisms.linear.sums import LinearInputs, Sums, definition, empty_sums
from polyformer.attention.mechanisms.random_directions import RandomDirections
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.softmax import recording
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates

NO_SCORE_BIAS_REASON = (
    "its keys are summed before queries read them: biases of distances need a Fourier transform of every "
    "feature times every value, measured slower than dense attention up to 16,384 tokens, and keep no state"
)
"""The reason why linear attention accepts no position scheme that changes scores.

With b[i - j] added to scores, numerators and denominators are Toeplitz products, by FFT in n log n (Luo et
al. 2021, section 3.2): one of M (Dv + 1) sequences of 2 n numbers. docs/results/mechanisms.md has its time. A
decoding step would need all keys again, because every token changes the distances of all keys.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomFeaturesConfig(MechanismConfig):
    """Options of the members, which differ in their feature map. `features`: the number of rows of W."""

    features: PositiveInt
    orthogonal: bool  # false: independent rows
    redraw_every: PositiveInt | None  # training steps; null for never
    floor: NonNegativeFloat = 0.01  # of denominators with sines; 0 for the raw estimate
    backend: MechanismBackend = "auto"  # "definition": all pairs at once

    supports_score_bias: ClassVar[bool] = False
    supports_context_parallel: ClassVar[bool] = True
    reads_any_sequence: ClassVar[bool] = True
    reasons: ClassVar[Mapping[str, str]] = {"supports_score_bias": NO_SCORE_BIAS_REASON}
    eager: ClassVar[str] = (
        "features are drawn from a seed that is read, and a Python loop walks over runs of tokens"
    )

    def __post_init__(self) -> None:
        if self.backend == "definition":
            object.__setattr__(self, "supports_context_parallel", False)

    @property
    def width(self) -> int:
        """Return the number of features of a vector: one or two per row of W."""
        return self.features

    def all_gathered_elements(self, heads: int, kv_heads: int, width: int, length: int, causal: bool) -> int:
        """Return the number of elements in the sums over all features of a key."""
        return packed_size(heads, width, self.width)


@dataclasses.dataclass(frozen=True)
class LinearState(State):
    """S [B, H, Dv + 1, M] times e^-top, and top and mass [B, H], see `sums`. None without tokens."""

    sums: Tensor | None = None
    top: Tensor | None = None
    mass: Tensor | None = None

    def past(self, rows: int, heads: int, width: int, kernel: Kernel) -> Sums:
        """Return the sums with rows and heads merged into one dimension, for values of `width` dimensions."""
        if self.sums is None or self.top is None or self.mass is None:
            return empty_sums(rows * heads, width, kernel)
        return Sums(*(x.flatten(0, 1) for x in (self.sums, self.top, self.mass)))


def linear_attention(
    heads: Heads,
    kernel: Kernel,
    context: Context,
    state: State | None = None,
    weight: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """Return the output [B, H, Tq, Dv] in the precision of the kernel, and the next state, if any.

    heads: the queries, and the keys and values after the state's.
    weight, decay: [B, H, T] log weights of the keys, and log decays before each token (causal only).
    """
    assert isinstance(state, LinearState | None)
    q, k, v = heads
    with without_autocast(q):
        inputs = LinearInputs.of(heads, kernel, context, weight, decay)
        # Weights of single tokens exist only in the definition over all pairs.
        if recording():
            refuse_recording(context)
            if state is not None and state.sums is not None:
                raise InputError(
                    "output_attentions: the state of linear attention has no weights of single tokens; "
                    "pass the whole input at once"
                )
            return definition(inputs, context), None
        if context.shard is not None:
            return context_parallel_attention(inputs, context), None
        # Sums have rows and heads in one axis N = B H.
        rows, count = q.shape[:2]
        past = (state or LinearState()).past(rows, count, v.shape[3], kernel)
        if context.q_doc is None or context.kv_doc is None:
            out, past = attend_document(inputs, past)
        # Several documents in a row: only the first may continue the state.
        elif inputs.causal:
            out, past = attend_causal_documents(inputs, context.kv_doc, context.kv_len - k.shape[2], past)
        else:
            out = attend_noncausal_documents(inputs, context.q_doc, context.kv_doc, past)
        if state is None:
            return out, None
        return out, LinearState(*(x.unflatten(0, (rows, count)) for x in past))


@dataclasses.dataclass(frozen=True)
class GatedCache(StateOfStates):
    """The state of the definition: all keys and values, and the gates of the keys [B, H, T], if any."""

    cache: KeyValueCache
    weight: Tensor | None = None
    decay: Tensor | None = None

    def truncated_(self, count: int) -> "GatedCache | None":
        """See `State.truncated_`: gates are not truncated."""
        return super().truncated_(count) if self.weight is None else None


class RandomFeatureAttention(Mechanism):
    """Linear attention by random features, with the sums over keys as state (`LinearState`).

    With the backend "definition" it computes all pairs, with all keys as state.
    """

    config: RandomFeaturesConfig

    def __init__(self, config: RandomFeaturesConfig, head_size: int):
        super().__init__()
        self.config = config
        self.directions = RandomDirections(config.features, head_size, config.orthogonal, config.redraw_every)

    def new_state(self, reserve: int) -> State:
        """Return the sums over no keys; their size does not grow with the number of tokens."""
        if self.config.backend == "definition":
            return GatedCache(KeyValueCache(reserve=reserve))
        return LinearState()

    def kernel(self, q: Tensor) -> Kernel:
        """Return the feature map of queries and keys in the precision and on the device of `q`."""
        raise NotImplementedError

    def attend(
        self,
        heads: Heads,
        context: Context,
        state: State | None,
        weight: Tensor | None = None,
        decay: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """Return the output [B, H, Tq, Dv] in the precision of the kernel, and the next state.

        See `linear_attention` for the arguments.
        """
        if self.config.backend != "definition":
            y, state = linear_attention(heads, self.kernel(heads.q), context, state, weight, decay)
        else:
            if state is not None:
                assert isinstance(state, GatedCache)
                k, v, cache = state.cache.append(heads.k, heads.v)
                heads = Heads(heads.q, k, v)
                if weight is not None and decay is not None and state.weight is not None:
                    assert state.decay is not None
                    weight, decay = torch.cat([state.weight, weight], 2), torch.cat([state.decay, decay], 2)
                state = GatedCache(cache, weight, decay)
            with without_autocast(heads.q):
                inputs = LinearInputs.of(heads, self.kernel(heads.q), context, weight, decay)
                y = definition(inputs, context)
        self.directions.watch(y)
        return y, state


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerformerConfig(RandomFeaturesConfig):
    """Performer attention: positive random features estimate softmax attention in linear time.

    The rows of W [M, D] are drawn from N(0, I) and orthogonal in blocks of D. They are drawn again every
    `redraw_every` training steps. Lemma 2 and sections 2.3 and 2.4 of the paper; features "trigonometric" are
    its equation 10, "relu" the generalised attention of its section 4.3, which does not estimate softmax.

    Deviations: the maxima that keep exponentials in range are taken per query and key, joined in the log
    domain by a running maximum. The paper's code takes a maximum over the batch and the future, and adds a
    small number to every feature: here nothing is added, and padding has exactly no weight. The heads of a
    layer share W, as in the paper's code. Denominators below `floor` times the sum of weights, possible only
    for features with a sign, are raised to that bound.

    `features`: the number of rows of W; the trigonometric map computes two features per row.
    """

    features: PositiveInt = 256
    map: Literal["positive", "trigonometric", "relu"] = "positive"
    orthogonal: bool = True
    redraw_every: PositiveInt | None = 1000

    kind: ClassVar[str] = "performer"
    paper: ClassVar[str] = "Choromanski et al. 2021, section 2"

    @property
    def width(self) -> int:
        """Return the number of features of a vector: a sine and a cosine per row, or one exponential."""
        return self.features * (2 if self.map == "trigonometric" else 1)

    def build(self, num_heads: int, head_size: int) -> "Performer":
        """Return the module; all heads share W."""
        return Performer(self, head_size)

    @classmethod
    def examples(cls) -> tuple["PerformerConfig", ...]:
        """Return configs with few features of every map."""
        return (
            cls(features=16),
            cls(features=9, orthogonal=False, redraw_every=2),
            cls(features=5, map="relu"),
        )


class Performer(RandomFeatureAttention):
    """Attention by the features of q / D^(1/4) and k / D^(1/4)."""

    config: PerformerConfig

    def kernel(self, q: Tensor) -> Kernel:
        # Positive features need no floor: all terms of the denominator are positive.
        floor = self.config.floor if self.config.map == "trigonometric" else 0.0
        # D^(-1/4) for both q and k gives scores of q . k / sqrt(D).
        return Kernel(MAPS[self.config.map], self.directions(q), floor, factor=q.shape[3] ** -0.25)

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Attend in at least float32: features are exponentials, which half precision would round."""
        y, state = self.attend(Heads(at_least_float32(q), at_least_float32(k), v), context, state)
        return y.to(q.dtype), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class RFAConfig(RandomFeaturesConfig):
    """Random feature attention: sines and cosines estimate softmax attention in linear time.

    The scores are q . k / sigma^2 of unit vectors, because all lengths are equal. The temperature sigma is
    learned per head. The gated form forgets, and z_t follows S_t. Without causality all queries use the sums
    over all keys. Sections 3.1 and 3.2 and appendix A.2 of the paper.

    Deviations: the paper's gate reads the layer's input; here it reads the key, since a mechanism gets only
    projections. Without causality, where the paper has no gates, they only weigh keys by 1 - g. sigma is a
    scalar per head. An estimate may be near 0 or negative: denominators are raised to at least `floor` times
    the sum of weights. The heads of a layer share W.

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
