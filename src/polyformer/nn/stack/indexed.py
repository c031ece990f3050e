"""Attention with an indexer: small heads choose the keys of each query (DeepSeek sparse attention).

    I_ts = sum_j w_tj ReLU(q_tj . k_s) / sqrt(J D)      j = 1 .. J: heads of the indexer, of width D
    S_t  = the K keys with the largest I_ts, of those that the pattern and the context allow
    y_t  = attention of query t to the keys in S_t

q_tj = c_t W_q^j, k_s = norm(x_s W_k) and w_t = x_t W_w. c_t is the latent of queries, or x_t without one.
Positions rotate q and k as they rotate queries and keys of the attention. Of keys with equal scores the
earlier ones are chosen.

A choice has no gradient. In training the indexer has a separate loss, and nothing else learns from
it, since its inputs are detached:

    L = mean_t KL(p_t || softmax_(s in S_t) I_ts)       p_t: the attention of query t, the mean over heads

A model is trained in the stage 'dense', in which S_t are all allowed keys and only the indexer should learn,
and then in the stage 'sparse'. DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyformer.attention.functional.parts import soft_cap
from polyformer.attention.functional.request import Call, indices, prepare
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig, PositionTerms
from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention
from polyformer.attention.patterns.base import MaskMod, Pattern
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.positions import Position
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.ops.autograd import at_least_float32, in_autocast_type
from polyformer.core.ops.layers import add_auxiliary_loss
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.softmax import recorded, recording
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State, StateOfStates
from polyformer.nn.stack.attention_options import IndexerConfig
from polyformer.nn.stack.config import AttentionConfig
from polyformer.nn.stack.feature_attention import FeatureAttention
from polyformer.nn.stack.latent import LatentAttention
from polyformer.nn.stack.multihead import rotate, split_heads

PRODUCTS = 1 << 24
"""The most products q_tj . k_s that are in memory at once, if no gradient needs them all."""


class Indexer(nn.Module):
    """The projections of an indexer. source_size: the width of c_t. rotated: the channels with positions."""

    def __init__(
        self, hidden_size: int, source_size: int, config: IndexerConfig, head_size: int, rotated: int
    ):
        super().__init__()
        self.size = config.width(head_size, rotated)
        self.query = Linear(source_size, config.heads * self.size, bias=False)
        self.key = Linear(hidden_size, self.size, bias=False)
        self.key_norm = config.norm.build(self.size)
        self.weights = Linear(hidden_size, config.heads, bias=False)
        self.scale = (config.heads * self.size) ** -0.5

    def forward(self, source: Tensor, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, J, Tq, D] and k [B, 1, Tk, D] before positions, and the weights [B, Tq, J].

        source: the input c [B, Tq, C] of q. x [B, Tq, E], read [B, Tk, E]: the inputs of weights and of k.
        """
        k = self.key_norm(self.key(read)).unsqueeze(1)
        return split_heads(self.query(source), self.size), k, self.weights(x) * self.scale


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return I [B, Tq, Tk], at least in float32, of q [B, J, Tq, D], k [B, 1, Tk, D], weights [B, Tq, J]."""
    q, k, weights = at_least_float32(q), at_least_float32(k), at_least_float32(weights)
    rows = max(1, PRODUCTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or q.shape[2] <= rows:
        return torch.einsum("btj,bjts->bts", weights, (q @ k.mT).relu())
    parts = zip(q.split(rows, 2), weights.split(rows, 1))
    return torch.cat([torch.einsum("btj,bjts->bts", w, (part @ k.mT).relu()) for part, w in parts], 1)


def choose(scores: Tensor, count: int) -> Tensor:
    """Return which keys have the `count` largest scores [B, Tq, Tk], the first of equal ones: bools.

    Keys with a score of minus infinity are never chosen.
    """
    least = scores.topk(min(count, scores.shape[-1])).values[..., -1:]
    above, equal = scores > least, (scores == least) & (scores > -torch.inf)
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


class Attended(NamedTuple):
    """The arguments of a call of attention, with all keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    context: Context
    position: PositionTerms


class ChosenKeys(SoftmaxAttention):
    """Softmax attention to the keys with the largest scores of an indexer."""

    def __init__(self, config: SoftmaxConfig, num_heads: int, indexer: IndexerConfig):
        super().__init__(config, num_heads)
        self.indexer = indexer

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: PositionTerms,
        *gates: Tensor,
    ) -> tuple[Tensor, State | None]:
        """See `Mechanism.forward`. gates: q, all k, and the weights of the indexer (`index_scores`)."""
        k, v, state = appended(state, k, v)
        call, chosen = Attended(q, k, v, context, position), None
        chooses = self.indexer.stage == "sparse" and k.shape[2] > self.indexer.top_k
        learns = self.training and self.indexer.align > 0 and torch.is_grad_enabled()
        if chooses or learns:
            scores = self._of_allowed(index_scores(*gates), call)
            chosen = choose(scores.detach(), self.indexer.top_k) if chooses else None
            if learns:
                add_auxiliary_loss("indexer", self.indexer.align * self._loss(scores, chosen, call))
        gathers = q.shape[2] == 1 and position is None and self.config.pattern is None and not recording()
        if chosen is not None and gathers:
            return self._gathered(call, chosen), state
        return self._masked(call, chosen), state

    def _masked(self, call: Attended, chosen: Tensor | None) -> Tensor:
        """Return attention [B, H, Tq, Dv] to the chosen keys [B, Tq, Tk], to all allowed keys for None."""
        rule = None
        if call.position is not None:
            call = call._replace(context=call.context.within_distances(self.distances))
        if chosen is not None:
            rule = broadcasts(lambda b, h, q_idx, kv_idx: chosen[b, q_idx, kv_idx])
        return self._softmax(call, self.config.pattern, rule)

    def _gathered(self, call: Attended, chosen: Tensor) -> Tensor:
        """Return the attention of a single query from the chosen keys only, which need no other."""
        # In the order of the text, and then keys that fill up the number, which are masked.
        index = chosen.int().topk(self.indexer.top_k, -1).indices.sort(-1).values
        k, v = (x.gather(2, index.unsqueeze(3).expand(-1, *x.shape[1:2], -1, x.shape[3])) for x in call[1:3])
        context = Context(1, self.indexer.top_k, kv_valid=chosen.gather(-1, index)[:, 0])
        return self._softmax(Attended(call.q, k, v, context, None), None, None)

    def _softmax(self, call: Attended, pattern: Pattern | None, rule: MaskMod | None) -> Tensor:
        """Return softmax attention to all keys that the pattern and the rule allow."""
        mods = () if self.config.soft_cap is None else (soft_cap(self.config.soft_cap),)
        options = {"pattern": pattern, "mask_mod": rule, "mods": mods, "scale": self.config.scale}
        return self.attend(*call, sink=self.sink, **options)

    def _of_allowed(self, scores: Tensor, call: Attended) -> Tensor:
        """Return the scores [B, Tq, Tk], minus infinity for keys that no head of a query may see."""
        q, k, v = (in_autocast_type(x) for x in call[:3])
        request = prepare(Call(q, k, v, self.config.pattern, context=call.context))
        if request.pattern is None:
            return scores
        allowed = request.pattern.mask(request.context, *indices(request))
        return scores.masked_fill(~(allowed.any(1) if allowed.dim() == 4 else allowed), -torch.inf)

    def _loss(self, scores: Tensor, chosen: Tensor | None, call: Attended) -> Tensor:
        """Return the mean over the queries of KL(p || softmax I) over the chosen keys; None for all."""
        with torch.no_grad(), recorded() as weights:
            self._masked(call, chosen)
        p = at_least_float32(weights[0]).mean(1)
        if chosen is not None:
            scores = scores.masked_fill(~chosen, -torch.inf)
        log_q = scores.log_softmax(-1).masked_fill(scores == -torch.inf, 0)
        divergence = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
        valid = call.context.q_valid
        return divergence.mean() if valid is None else divergence[valid].mean()


@dataclasses.dataclass(frozen=True)
class IndexedState(StateOfStates):
    """The states of the attention and of the indexer, a KV cache of its keys without values."""

    attention: State | None = None
    index: State | None = None


class IndexedAttention(FeatureAttention):
    """Attention of all its features to keys that an indexer chooses: x [B, T, E] -> [B, T, E]."""

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int = 0):
        super().__init__(hidden_size, config, layer)
        assert config.indexer is not None
        rotated, source = config.rotary_width(hidden_size), self.query.in_features
        self.indexer = Indexer(hidden_size, source, config.indexer, self.head_size, rotated)

    def _built_mechanism(self, config: MechanismConfig) -> Mechanism:
        """Return softmax attention to the chosen keys."""
        assert isinstance(config, SoftmaxConfig)
        assert self.config.indexer is not None
        return ChosenKeys(config, self.config.num_attention_heads, self.config.indexer)

    def new_state(self, reserve: int) -> State | None:
        """Return the state before the first token, with caches for `reserve` tokens."""
        return IndexedState(self.mechanism.new_state(reserve), KeyValueCache(reserve=reserve))

    def reach(self) -> Reach | None:
        """Return None: the indexer's cache keeps all keys."""
        return None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        position: Position,
        state: State | None,
        *gates: Tensor,
    ) -> tuple[Tensor, State | None]:
        """Return attention [B, H, Tq, Dv] of heads before positions, and the next state.

        gates: q, k and weights of the indexer.
        """
        index_q, index_k, weights = gates
        if position.rotates:
            index_q, index_k = rotate(index_q, index_k, context, position, self._site())
        return super().attend(q, k, v, context, position, state, index_q, index_k, weights)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, *terms: Any
    ) -> tuple[Tensor, State | None]:
        """Return attention [B, H, Tq, Dv] to the chosen keys of the state and of k, and the next state."""
        position, index_q, index_k, weights = terms
        past = state if isinstance(state, IndexedState) else IndexedState()
        index_k, _, index = appended(past.index, index_k, index_k[..., :0])
        y, own = super()._attend(q, k, v, context, past.attention, position, index_q, index_k, weights)
        return y, None if state is None else IndexedState(own, index)

    def _gates(self, x: Tensor, source: Tensor, read: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and weights of the indexer, of inputs that do not learn from it."""
        return self.indexer(source.detach(), x.detach(), read.detach())


class IndexedLatentAttention(IndexedAttention, LatentAttention):
    """Latent attention to tokens that an indexer chooses, as in DeepSeek-V3.2."""
