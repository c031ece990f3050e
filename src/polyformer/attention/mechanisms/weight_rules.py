"""Rules that make weights of the scores of all pairs, other than the softmax of each head's products.

    cosine          w = softmax(t cos(q_i, k_j))                   t of each head, learned, at most 100
    sigmoid         w_ij = sigmoid(s_ij + b)                       b = -log n_i, for the n_i keys that i sees
    talking_heads   w^g = sum_h A_hg softmax(sum_f B_fh s^f)^h     matrices B, A [H, H] of scores and weights
    cope            w = softmax(s_ij + q_i . e[p_ij] / sqrt(D))    e[p] between the vectors of two whole p
                    p_ij = sum of sigmoid(s_il) over the keys l from j to i, at most `max_position`
    selective       w = softmax(s_ij - F_ij)                       F_ij = sum_(l < i) S_lj
                    S_lj = max(0, s_lj) of the first head; 0 for j = l and for the first token

s_ij = q_i . k_j / sqrt(D) with the terms of the positions, and y_i = sum_j w_ij v_j. `cosine` is a call of
`attend`; each other rule is its definition over all pairs (`PairWeights`).
"""

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import MechanismConfig, PositionTerms, check_head_size
from polyformer.attention.mechanisms.pair_weights import CachedAttention, PairWeights, PairWeightsConfig
from polyformer.attention.patterns.base import Pattern
from polyformer.core.errors import InputError, quote
from polyformer.core.kv_cache import appended
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.softmax import shares
from polyformer.core.ranges import PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State

MOST_LOG_SCALE = math.log(100)
"""The limit of Swin Transformer V2: its temperature 1 / t is at least 0.01."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineConfig(PairWeightsConfig):
    """Cosine attention: scores are cosines of queries and keys times a learned number of each head.

    Scores are bounded, whatever the norms of the projections are, and terms of positions are added to them.
    Half precision is computed in float32: a large t would multiply the rounding of normalised vectors. Cost:
    as softmax attention, and D products to normalise each key of the cache.

    `initial`: the first t of all heads.
    """

    initial: PositiveFloat = 10.0
    backend: str = "auto"

    kind: ClassVar[str] = "cosine"
    paper: ClassVar[str] = "Henry et al. 2020, equation 3; Liu et al. 2022 (Swin Transformer V2), equation 2"
    supports_part_rotations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            raise InputError(f"scale: {quote(self.kind)} learns it; set initial instead, got {self.scale}")

    def build(self, num_heads: int, head_size: int) -> "Cosine":
        check_head_size(head_size)
        return Cosine(self, num_heads)


class Cosine(CachedAttention):
    """The module of `CosineConfig`: `log_scale` [H], log t."""

    config: CosineConfig

    def __init__(self, config: CosineConfig, num_heads: int):
        super().__init__()
        self.config = config
        self.log_scale = nn.Parameter(torch.full((num_heads,), math.log(config.initial)))

    def reach(self) -> Reach | None:
        """Return the reach of the pattern."""
        return self.config.reach

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return softmax(t cos(q, k)) v over all keys of the cache, and the next cache."""
        dtype = q.dtype
        k, v, state = appended(state, k, v)
        q, k, v, log_t = (at_least_float32(x) for x in (q, k, v, self.log_scale))
        t = log_t.clamp_max(MOST_LOG_SCALE).exp().view(-1, 1, 1)
        q, k = F.normalize(q, dim=-1) * t.to(q.dtype), F.normalize(k, dim=-1)
        y = self.attend(q, k, v, context, position, pattern=self.config.pattern, scale=1.0)
        return y.to(dtype), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidConfig(PairWeightsConfig):
    """Sigmoid attention: weights are independent, and keys do not compete.

    The default bias -log n makes the first weights of a query sum to about 1, whatever the length. Deviation:
    the paper's n is the length of the row; here it is the number of keys that a query sees, so that padding,
    other documents and later tokens do not change a text.

    `score_bias`: the number that is added to all scores; None for -log n.
    """

    score_bias: float | None = None

    kind: ClassVar[str] = "sigmoid"
    paper: ClassVar[str] = "Ramapuram et al. 2024, section 3"

    @classmethod
    def examples(cls) -> tuple["SigmoidConfig", ...]:
        """Return both biases."""
        return cls(), cls(score_bias=-1.5)

    def build(self, num_heads: int, head_size: int) -> "SigmoidAttention":
        return SigmoidAttention(self)


class SigmoidAttention(PairWeights):
    """The module of `SigmoidConfig`, without parameters."""

    config: SigmoidConfig

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return sigmoid(s + b) [B, H, Tq, Tk]; the weights of a query need not sum to 1."""
        if self.config.score_bias is not None:
            return torch.sigmoid(scores + self.config.score_bias)
        n = allowed.sum(-1, keepdim=True).clamp_min(1)  # a query at padding sees no key
        return torch.sigmoid(scores - n.to(scores.dtype).log())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TalkingHeadsConfig(PairWeightsConfig):
    """Talking-heads attention: learned sums over heads of the scores, and of the weights after the softmax.

    Both matrices are the identity at first, which is softmax attention. Heads of different patterns: a pair
    that a head does not see adds nothing to other heads, and no sum makes it visible. Deviation: the three
    numbers of heads (of keys, of weights, of values) that the paper may choose are equal here.
    """

    kind: ClassVar[str] = "talking_heads"
    paper: ClassVar[str] = "Shazeer et al. 2020 (Talking-Heads Attention), section 4"

    def build(self, num_heads: int, head_size: int) -> "TalkingHeads":
        return TalkingHeads(self, num_heads)


class TalkingHeads(PairWeights):
    """The module of `TalkingHeadsConfig`: `of_scores` and `of_weights` [H, H], from head to head."""

    def __init__(self, config: TalkingHeadsConfig, num_heads: int):
        super().__init__(config)
        self.of_scores = nn.Parameter(torch.eye(num_heads))
        self.of_weights = nn.Parameter(torch.eye(num_heads))

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the mixed softmax of the mixed scores [B, H, Tq, Tk]."""
        mixed = _mixed(scores.masked_fill(~allowed, 0.0), self.of_scores)
        weights, _ = shares(mixed.masked_fill(~allowed, -torch.inf))
        return _mixed(weights, self.of_weights)


def _mixed(x: Tensor, matrix: Tensor) -> Tensor:
    """Return sum_h x^h matrix_hg [B, G, Tq, Tk] of x [B, H, Tq, Tk]."""
    return torch.einsum("bhij,hg->bgij", x, matrix.to(x.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopeConfig(PairWeightsConfig):
    """Contextual position encoding (CoPE): a query counts the keys that its gates select.

    Each query decides by content what a position is, such as a word or a sentence: p_ij counts the tokens
    from key j to query i, each by its gate. The vectors e are zeros at first, which is softmax attention, and
    all heads of a layer share them. It is a mechanism and not a position scheme, because gates are of scores
    with the terms of all positions, and a sum over the keys that the pattern allows.

    Deviations: q_i . e[p] is scaled as q_i . k_j is. In an encoder, which the paper does not have, p_ij
    counts the keys between i and j on both sides.

    `max_position`: the largest position; farther keys share its vector.
    """

    max_position: PositiveInt = 64

    kind: ClassVar[str] = "cope"
    paper: ClassVar[str] = "Golovneva et al. 2024 (CoPE), equations 3 to 6"

    @classmethod
    def examples(cls) -> tuple["CopeConfig", ...]:
        """Return a table that is shorter than the texts of tests."""
        return (cls(max_position=3),)

    def cross(self, pattern: Pattern | None = None) -> MechanismConfig:
        """Return softmax attention: keys of another sequence have no tokens between them and a query."""
        return MechanismConfig.cross(self, pattern)

    def build(self, num_heads: int, head_size: int) -> "Cope":
        return Cope(self, head_size)


class Cope(PairWeights):
    """The module of `CopeConfig`: `positions` [max_position + 1, D]."""

    config: CopeConfig

    def __init__(self, config: CopeConfig, head_size: int):
        super().__init__(config)
        self.positions = nn.Parameter(torch.zeros(config.max_position + 1, head_size))

    def weights_of_call(self, q: Tensor, context: Context, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return softmax(s_ij + q_i . e[p_ij] / sqrt(D)) [B, H, Tq, Tk]."""
        scale = q.shape[3] ** -0.5 if self.config.scale is None else self.config.scale
        of_whole = (q.to(scores.dtype) * scale) @ self.positions.to(scores.dtype).mT  # [B, H, Tq, P + 1]
        counted = self._counted(scores, allowed, context)
        below = counted.detach().floor()
        share, index = counted - below, below.long()
        above = of_whole.gather(-1, (index + 1).clamp_max(self.config.max_position))
        term = above * share + of_whole.gather(-1, index) * (1 - share)
        return shares((scores + term).masked_fill(~allowed, -torch.inf))[0]

    def _counted(self, scores: Tensor, allowed: Tensor, context: Context) -> Tensor:
        """Return the positions p [B, H, Tq, Tk], from 0 to `max_position`."""
        gates = torch.sigmoid(scores).masked_fill(~allowed, 0.0)
        total = gates.cumsum(-1)
        slots = context.offset + torch.arange(context.q_len, device=scores.device)
        own = slots.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
        # From j to i with both ends, on either side of i.
        until, self_gate = total.gather(-1, own), gates.gather(-1, own)
        left, right = until - total + gates, total - until + self_gate
        earlier = torch.arange(scores.shape[3], device=scores.device) <= slots.unsqueeze(1)
        return torch.where(earlier, left, right).clamp(0, self.config.max_position)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveConfig(PairWeightsConfig):
    """Selective attention: a token can mask earlier keys for all queries after it.

    The scores of the first head say which keys a token finds to be no longer needed; their sums are
    subtracted from the scores of all heads. There are no parameters. The first token of each document and a
    token's own key are never masked. An encoder sums over earlier queries too. F depends on earlier queries,
    so that there is no KV cache; the paper keeps F in the cache and drops masked keys.
    """

    kind: ClassVar[str] = "selective"
    paper: ClassVar[str] = "Leviathan et al. 2024 (Selective Attention), section 3"
    supports_kv_cache: ClassVar[bool] = False
    supports_recurrence: ClassVar[bool] = False
    separate_queries: ClassVar[bool] = False

    def cross(self, pattern: Pattern | None = None) -> MechanismConfig:
        """Return softmax attention: a token has no key of its own in another sequence."""
        return MechanismConfig.cross(self, pattern)

    def build(self, num_heads: int, head_size: int) -> "Selective":
        return Selective(self)


class Selective(PairWeights):
    """The module of `SelectiveConfig`, without parameters."""

    def weights_of_call(self, q: Tensor, context: Context, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return softmax(s - F) [B, H, T, T]."""
        seen = allowed[:, :1]
        if context.q_valid is not None:  # in an encoder padding has scores, too, of which nothing is masked
            seen = seen & context.q_valid[:, None, :, None]
        before = torch.ones(seen.shape[2:], dtype=torch.bool, device=seen.device).tril(-1)
        first = ~(seen & before).any(-1)  # [B, 1, T]: tokens that see no earlier one
        own = torch.eye(len(before), dtype=torch.bool, device=seen.device)
        masks = scores[:, :1].relu().masked_fill(~seen | own | first.unsqueeze(2), 0.0)
        earlier = masks.cumsum(2) - masks
        return shares((scores - earlier).masked_fill(~allowed, -torch.inf))[0]
