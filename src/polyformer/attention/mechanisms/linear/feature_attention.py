"""Linear attention by feature maps: the sums over keys are computed once, or pass from token to token.

    y_i = sum_j w_ij (phi(q_i) . phi(k_j)) v_j / sum_j w_ij (phi(q_i) . phi(k_j))
    w_ij = exp(weight_j + decay_(j+1) + ... + decay_i)        over the keys j that query i attends to

Token by token it is the recurrence S = e^decay S + e^weight v phi(k)^T, z = e^decay z + e^weight phi(k),
y = S phi(q) / (z . phi(q)). Documents in one row are computed one after another.

Katharopoulos et al. 2020, section 3. Cost: 2 M (D + 2 Dv) products per token and head, plus half a run's
M + Dv in the causal form; the state has M (Dv + 1) numbers per head, independent of the number of tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.plan import refuse_recording
from polyformer.attention.mechanisms.base import Heads, Mechanism, MechanismBackend, MechanismConfig
from polyformer.attention.mechanisms.linear.context_parallel import context_parallel_attention, packed_size
from polyformer.attention.mechanisms.linear.definition import LinearInputs, definition
from polyformer.attention.mechanisms.linear.documents import (
    attend_causal_documents,
    attend_document,
    attend_noncausal_documents,
)
from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.mechanisms.linear.sums import Sums, empty_sums
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.autograd import without_autocast
from polyformer.core.ops.random_directions import RandomDirections
from polyformer.core.ops.softmax import recording
from polyformer.core.ranges import NonNegativeFloat, PositiveInt
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

    def all_gathered_elements(self, heads: int, kv_heads: int, width: int, length: int) -> int:
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
