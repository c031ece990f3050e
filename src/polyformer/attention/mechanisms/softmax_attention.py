"""Softmax attention over a pattern of keys, and members that change its weights P.

    softmax        y = P v
                   P = softmax(q k^T / sqrt(D)), dense as in 2017, or sparse
    differential   y = (1 - lambda_0) norm((P - lambda P') [v, v'])
                   lambda = exp(a . b) - exp(a' . b') + lambda_0
                   lambda_0 = 0.8 - 0.6 exp(-0.3 l) in layer l = 0, 1, ...
    persistent     y = softmax([q k^T, q K^T] / sqrt(D)) [v; V]
                   K and V [N, D]: learned, the same for all texts
    svd            y = U_r S_r W_r^T v, the `rank` largest singular values of P = U S W^T

The first three read the keys of a KV cache; `svd` is for encoders only.
"""

import copy
import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.int8_pairs import attend_to_integers
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.parts import soft_cap
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import (
    DelegatedTerms,
    Heads,
    Mechanism,
    MechanismConfig,
    PositionTerms,
    check_head_size,
)
from polyformer.attention.mechanisms.pair_weights import CachedAttention, PairWeightsConfig
from polyformer.core.kv_cache import Int8Cache, Int8Pairs, appended
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.layers import dropout
from polyformer.core.ops.softmax import amend, softmax
from polyformer.core.ranges import PositiveFloat, PositiveInt, Probability, UnitFloat
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(PairWeightsConfig):
    """Softmax attention: queries attend to the keys that a pattern allows.

    With a soft cap c the scores are c tanh(s / c), after all terms of positions (Gemma Team 2024, section 2).
    With a sink each head learns the score b of a key without a value (OpenAI 2025, gpt-oss, section 2), so
    that weights may sum to less than 1: p_j = exp(s_j) / (exp(b) + sum_i exp(s_i)). Cost: 2 Tq Tk (D + Dv)
    products per head if the pattern is full, otherwise proportional to the keys it allows.

    `pattern`: which keys each query attends to, in addition to the mask of causality, padding and documents;
    None for all keys. `soft_cap`: the limit of scores, by tanh; None for none. `sink`: whether each head
    learns the score of a key without a value.
    """

    soft_cap: PositiveFloat | None = None
    sink: bool = False
    backend: str = "auto"

    kind: ClassVar[str] = "softmax"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.2"
    supports_part_rotations: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = True

    @property
    def changes_scores(self) -> bool:
        """Return whether the weights are not the softmax of the scaled products: by a soft cap or a sink."""
        return self.soft_cap is not None or self.sink

    def build(self, num_heads: int, head_size: int) -> "SoftmaxAttention":
        return SoftmaxAttention(self, num_heads)

    @classmethod
    def examples(cls) -> tuple["SoftmaxConfig", ...]:
        return cls(), cls(soft_cap=1.5, sink=True)


class SoftmaxAttention(CachedAttention):
    """Softmax attention by `attend`, with a KV cache as state."""

    reads_plain_positions = False

    def __init__(self, config: SoftmaxConfig, num_heads: int):
        super().__init__()
        self.config = config
        self.distances = None if config.pattern is None else config.pattern.structure.distances
        # A score of 0, as of a query and a key at right angles.
        self.sink = nn.Parameter(torch.zeros(num_heads)) if config.sink else None

    def reach(self) -> Reach | None:
        """Return the reach of the pattern."""
        return self.config.reach

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return softmax(q k^T scale) v over the pattern and all keys of the cache, and the next cache."""
        if isinstance(state, Int8Cache):
            integers, state = state.extended(k, v)
            y = self._attend_to_integers(q, integers, context, position)
            if y is not None:
                return y, state
            k, v = integers.dequantized(k.dtype)
        elif state is not None:
            k, v, state = appended(state, k, v)
        config, pattern = self.config, self.config.pattern
        mods = () if config.soft_cap is None else (soft_cap(config.soft_cap),)
        if position is not None:
            # Tables of relative positions are then computed only for distances inside the pattern.
            context = context.within_distances(self.distances)
        y = self.attend(
            q, k, v, context, position, pattern=pattern, mods=mods, scale=config.scale, sink=self.sink
        )
        return y, state

    def _attend_to_integers(
        self, q: Tensor, integers: Int8Pairs, context: Context, position: PositionTerms
    ) -> Tensor | None:
        """Return the attention of a single query, computed from the integers; None for other calls."""
        config = self.config
        plain = (position is None or position.is_plain) and not config.changes_scores
        if config.backend != "auto" or not plain:
            return None
        return attend_to_integers(q, integers, config.pattern, context, config.scale)


EPS = 1e-5
"""Of the norm, as in the authors' code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifferentialConfig(MechanismConfig):
    """Differential attention: a pair of heads subtracts two attention maps of the same values.

    This cancels weight on irrelevant tokens. The prime denotes head i + H / 2 next to head i: both attend to
    the same values of width 2 D. `norm` is an RMS norm of each pair's output. The vectors a, b, a', b' [D]
    and the weight of the norm [2 D] are shared by all pairs of a layer. A position scheme's vectors of
    values, such as Shaw's, are added to both v and v'. Deviation: none; the authors' code pairs heads 2 i and
    2 i + 1, which only permutes the rows of projections. Cost: 2 Tq Tk (D + 2 D) products per head, half as
    many more as softmax attention.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistentConfig(PairWeightsConfig):
    """Persistent vectors: every query also attends to learned keys and values.

    The softmax is over the keys of the text and N further keys of each head, which no mask hides and which
    have no position. With `feedforward: none` a layer is the paper's all-attention layer; a dense layer is
    attention to persistent vectors with another activation than the softmax. Deviation: the paper has no
    rotated positions; here `rope` rotates the queries of persistent keys too. Cost: as softmax attention, and
    4 N D products per query and head.

    `vectors`: the number N of each head.
    """

    vectors: PositiveInt = 1024
    backend: str = "auto"

    kind: ClassVar[str] = "persistent"
    paper: ClassVar[str] = "Sukhbaatar et al. 2019 (all-attention), section 3.2"
    supports_part_rotations: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "Persistent":
        return Persistent(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["PersistentConfig", ...]:
        return (cls(vectors=3),)


class Persistent(CachedAttention):
    """Softmax attention to the keys of a cache and to learned `keys`, `values` [H, N, D]."""

    def __init__(self, config: PersistentConfig, num_heads: int, head_size: int):
        super().__init__()
        check_head_size(head_size)
        self.config = config
        shape = num_heads, config.vectors, head_size
        # The factors of `forward` make both of variance 1, as the authors' do.
        self.keys = nn.Parameter(torch.randn(shape) * head_size**-0.5)
        self.values = nn.Parameter(torch.randn(shape) * config.vectors**-0.5)

    def reach(self) -> Reach | None:
        """Return the reach of the pattern."""
        return self.config.reach

    def probe(self) -> "Persistent":
        """Return the module with persistent values of 0."""
        probe = copy.copy(self)
        probe._parameters = {**self._parameters, "values": nn.Parameter(torch.zeros_like(self.values))}
        return probe

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return the attention [B, H, Tq, D] to both kinds of keys, and the next cache."""
        k, v, state = appended(state, k, v)
        scale = q.shape[3] ** -0.5 if self.config.scale is None else self.config.scale
        y, lse = self.attend_with_lse(Heads(q, k, v), context, position, self.config.pattern, scale)
        queries = at_least_float32(q)
        keys, values = (x.to(queries.dtype) for x in (self.keys, self.values))
        scores = queries @ keys.mT * (scale * q.shape[3] ** 0.5)
        weights = dropout(scores.softmax(-1), self.config.dropout, self.training)
        persistent = weights @ values * values.shape[1] ** 0.5
        # Padding sees no key, and its output is 0 as in every mechanism.
        persistent = persistent.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
        # One softmax over both: each part has the share exp(lse) of the sum.
        share = torch.sigmoid(lse - scores.logsumexp(-1)).unsqueeze(-1)
        amend(lambda weights: weights * share.detach())
        return (share * y + (1 - share) * persistent).to(q.dtype), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVDConfig(MechanismConfig):
    """Low-rank attention: attention probabilities are truncated to their largest singular values.

    This is the baseline that Linformer was made to avoid: the best approximation of P by a matrix of that
    rank (Eckart and Young 1936). Rows and columns of padding are zeros in P, so that they have no influence.
    Only for encoders: a singular vector depends on all tokens.

    Cost: T^2 scores and O(T^3) for the decomposition, per head: it shows how much a rank can represent, and
    is not fast. Deviation: gradients treat the space of U_r as constant, with the output as a projection U_r
    U_r^T of P; gradients through U_r would be infinite where singular values are equal. float16 and bfloat16
    are computed in float32.

    `rank`: the number of singular values that are kept; all of them if there are fewer tokens.
    """

    rank: PositiveInt = 64
    dropout: Probability = 0.0  # of attention weights, after the decomposition

    kind: ClassVar[str] = "svd"
    paper: ClassVar[str] = "Wang et al. 2020, section 3, equation 6"
    causal: ClassVar[bool] = False
    supports_packing: ClassVar[bool] = False
    supports_kv_cache: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = False
    reads_any_sequence: ClassVar[bool] = True  # any attention weights have a decomposition

    def build(self, num_heads: int, head_size: int) -> "SVDAttention":
        return SVDAttention(self)

    @classmethod
    def examples(cls) -> tuple["SVDConfig", ...]:
        return (cls(rank=3),)


class SVDAttention(Mechanism):
    """Softmax attention with weights truncated to a lower rank."""

    def __init__(self, config: SVDConfig):
        super().__init__()
        self.config = config

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return U_r S_r W_r^T v of P, with zeros in P for padding, and the state unchanged."""
        dtype, groups = q.dtype, q.shape[1] // k.shape[1]
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores, allowed = q @ k.mT * q.shape[3] ** -0.5, None
        if context.q_valid is not None and context.kv_valid is not None:
            # Rows of padding are masked too: otherwise they would change the singular vectors.
            allowed = context.q_valid.unsqueeze(2) & context.kv_valid.unsqueeze(1)
            allowed = allowed.unsqueeze(1)  # [B, 1, Tq, Tk]
        weights = truncate_rank(softmax(scores, allowed)[0], self.config.rank)
        weights = dropout(weights, self.config.dropout, self.training)
        return (weights @ v).to(dtype), state


def truncate_rank(weights: Tensor, rank: int) -> Tensor:
    """Return the nearest matrix of rank `rank` to weights P [..., Tq, Tk]: U_r U_r^T P = U_r S_r W_r^T."""
    if rank >= min(weights.shape[-2:]):
        return weights
    # Detached, because the gradient of the singular vectors may be infinite.
    left = torch.linalg.svd(weights.detach(), full_matrices=False).U[..., :rank]
    return left @ (left.mT @ weights)
