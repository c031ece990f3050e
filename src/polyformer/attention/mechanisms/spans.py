"""Attention spans: how far back a head attends is learned, and the runtime decreases with the spans.

    p_ij = m(d) e^(s_ij) / sum_r m(d_ir) e^(s_ir)        m(x) = clip((ramp + z - x) / ramp, 0, 1)

with the distance d = |i - j| and the span z, in tokens: a bias of log m(d) on the scores. The members differ
in z:

    adaptive_span   z_h, a parameter of head h
    dynamic_span    z_h(i) = max_span * sigmoid(v_h . q_i + b_h), predicted by every query

Training adds the auxiliary loss penalty times the mean of z for each layer. Sukhbaatar et al. 2019, sections
2.1 to 3. Deviation: an encoder, which the paper does not have, attends equally far on both sides.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig, PositionTerms
from polyformer.attention.patterns.base import Pattern, ScoreMod, TabulatedPattern
from polyformer.attention.patterns.layout import Keys, Structure, clip
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods, step
from polyformer.core.host_values import tensor_on
from polyformer.core.instrumentation import record_mark
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.ops.layers import add_auxiliary_loss
from polyformer.core.ranges import NonNegativeFloat, PositiveInt, Probability, UnitFloat
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State

SPAN_MULTIPLE = 64
"""Spans are rounded up to a multiple of this, so that there are few layouts and heads can share them."""


@dataclasses.dataclass(frozen=True)
class Spans(TabulatedPattern, named=False):
    """Attention spans: head h sees keys up to `spans[h][r]` positions away from the queries of run r.

    Runs are `run` queries long; None means a single run. With one row of spans all heads are alike.
    """

    spans: tuple[tuple[int, ...], ...]
    run: int | None = None

    def head_pattern(self, head: int) -> Pattern:
        """Return the spans of one head."""
        return self if len(self.spans) == 1 else Spans((self.spans[head],), self.run)

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the lookup of head and run in a table of the spans."""
        return SpanTable(tensor_on(self.spans, device), self.run)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the widest span of the queries, and without a mask the narrowest."""
        runs = slice(None) if self.run is None else slice(start // self.run, (stop - 1) // self.run + 1)
        own = [span for row in self.spans for span in row[runs]]
        # The slots of the first and the last query.
        first, last = start + context.offset, stop - 1 + context.offset
        return Keys(
            clip(first - max(own), last + max(own) + 1, context.kv_len),
            clip(last - min(own), first + min(own) + 1, context.kv_len),
        )

    @property
    def structure(self) -> Structure:
        """The widest span as reach; a rule on distances alone if all heads and runs are alike."""
        widest = max(span for row in self.spans for span in row)
        return Structure(by_distance=self.run is None and len(self.spans) == 1, reach=Reach(widest))


@dataclasses.dataclass(frozen=True, eq=False)
class SpanTable(Pattern, named=False):
    """Attention spans in a tensor [H or 1, runs]; a compiled kernel then depends on its shape only."""

    spans: Tensor
    run: int | None

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether |i - j| <= spans[h][i // run]."""
        # The span of each query: its head selects the row, its run the column.
        run = torch.zeros_like(q_idx) if self.run is None else q_idx // self.run
        span = self.spans[h if self.spans.shape[0] > 1 else torch.zeros_like(h), run]
        return context.distance(q_idx, kv_idx).abs() <= span


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedSpanConfig(MechanismConfig):
    """Options of both members.

    Spans are in tokens: a span of 0 still includes `ramp` - 1 keys next to the token, with decreasing weight.
    """

    max_span: PositiveInt = 1024  # the greatest distance that a head may attend to (S in the paper)
    ramp: PositiveInt = 32  # tokens over which m falls from 1 to 0 (R in the paper)
    initial: float = 0.0
    penalty: NonNegativeFloat = 2e-6  # on the mean span of each layer (lambda in the paper)
    dropout: Probability = 0.0  # of attention weights
    backend: str = "auto"

    paper: ClassVar[str] = "Sukhbaatar et al. 2019, section 2.2"
    supports_recurrence: ClassVar[bool] = True


class SpanAttention(Mechanism):
    """Softmax attention to the keys in reach, with log m(d) added to the scores and a KV cache as state."""

    config: LearnedSpanConfig

    def new_state(self, reserve: int) -> KeyValueCache:
        return KeyValueCache(reserve=reserve)

    def reach(self) -> Reach | None:
        """Return the greatest span."""
        return Reach(self.config.max_span)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        position: PositionTerms,
        *,
        pattern: Pattern,
        log_mask: Relative | ScoreMod,
    ) -> Tensor:
        """Return the output [B, H, Tq, D] for all keys; `log_mask` is added to the terms of the scheme."""
        relative = None if position is None else position.relative(q, k, context)
        score_mod = None if position is None else position.score_mod(q, k, context)
        if isinstance(log_mask, Relative):
            relative = log_mask if relative is None else log_mask.plus(relative)
        else:
            score_mod = chain_score_mods([score_mod, log_mask])
        return attend(
            q,
            k,
            v,
            # The definition masks all pairs by m and needs no layout.
            pattern=None if self.config.backend == "definition" else pattern,
            score_mod=score_mod,
            relative=relative,
            context=context,
            dropout=self.config.dropout if self.training else 0.0,
            backend=self.config.backend,
        )


def log_span_mask(spans: Tensor, distance: Tensor, ramp: int) -> Tensor:
    """Return log clip((ramp + span - distance) / ramp, 0, 1), minus infinity for invisible keys."""
    seen = ((ramp + spans - distance) / ramp).clamp(max=1.0)
    tiny = torch.finfo(seen.dtype).tiny
    # The clamp keeps the gradient of the logarithm finite where -inf is selected.
    return torch.where(seen > 0, seen.clamp_min(tiny).log(), -torch.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig(LearnedSpanConfig):
    """Adaptive span attention: each head learns how far back it attends.

    A layer computes only the keys within ramp + z_h, with heads of equal width together. Deviation: z is
    clamped to 0..max_span in the forward pass and a quadratic loss keeps its parameter near this range; the
    paper's code clamps the parameter after each step. Cost: 2 * min(ramp + z_h, max_span) * (D + Dv) per
    query, twice that in an encoder.

    `initial`: the first spans, as a fraction of `max_span`. Spans are in tokens: a span of 0 still includes
    `ramp` - 1 keys next to the token, with decreasing weight.
    """

    initial: UnitFloat = 0.0  # the first spans, as a fraction of max_span
    kind: ClassVar[str] = "adaptive_span"
    supports_context_parallel: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "AdaptiveSpan":
        return AdaptiveSpan(self, num_heads)

    def pattern_of(self, spans: Sequence[float]) -> Spans:
        """Return the pattern of keys that heads with these spans attend to."""
        reach = (min(self.max_span, math.ceil(span + self.ramp) - 1) for span in spans)
        return Spans(tuple((-(-span // SPAN_MULTIPLE) * SPAN_MULTIPLE,) for span in reach))

    @classmethod
    def examples(cls) -> tuple["AdaptiveSpanConfig", ...]:
        return cls(max_span=6, ramp=2, initial=0.5), cls(max_span=300, ramp=3)


class AdaptiveSpan(SpanAttention):
    """Softmax attention with a learned span [H] per head, and a KV cache as state."""

    config: AdaptiveSpanConfig

    def __init__(self, config: AdaptiveSpanConfig, num_heads: int):
        super().__init__()
        self.config = config
        self.fraction = nn.Parameter(torch.full((num_heads,), config.initial))

    def reach(self) -> Reach | None:
        """Return the widest learned span."""
        return self._pattern().structure.reach

    def spans(self) -> Tensor:
        """Return the span z of every head, [H], in tokens; on the meta device the initial spans."""
        fraction = self.fraction.detach()
        if fraction.is_meta:
            fraction = torch.full(fraction.shape, self.config.initial, device="cpu")
        return fraction.clamp(0, 1) * self.config.max_span

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return softmax attention with the bias log m(d) inside the spans; adds the auxiliary loss."""
        k, v, state = appended(state, k, v)
        add_auxiliary_loss("span", self._span_loss())
        record_mark("span (tokens)", lambda: self.spans().view(1, -1, 1).expand(q.shape[:3]), "queries")
        log_mask, pattern = self._log_mask(context), self._pattern()
        return self.attend(q, k, v, context, position, pattern=pattern, log_mask=log_mask), state

    def _span_loss(self) -> Tensor:
        """Return the mean span times its penalty, plus a quadratic loss that keeps fractions near 0..1."""
        inside = self.fraction.clamp(0, 1)
        weight = self.config.penalty * self.config.max_span
        return weight * inside.mean() + (self.fraction - inside).square().mean()

    def _log_mask(self, context: Context) -> Relative:
        """Return log m(d) for every head and distance d, -inf beyond max_span."""
        exact = self.fraction.to(torch.promote_types(self.fraction.dtype, torch.float32))
        # Straight-through: the clamp has gradient 1, so a span that left its range can recover.
        spans = (exact + (exact.clamp(0, 1) - exact).detach()) * self.config.max_span
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=spans.device).abs()
        seen = log_span_mask(spans.unsqueeze(1), distance, self.config.ramp)
        return Relative(first=least, bias=seen.masked_fill(distance > self.config.max_span, -torch.inf))

    def _pattern(self) -> Spans:
        """Return the pattern of keys with m above 0; while a graph is traced, max_span for all heads."""
        # Values of tensors cannot be read while tracing.
        if torch.compiler.is_compiling():
            return Spans(((self.config.max_span,),))
        return self.config.pattern_of(self.spans().tolist())


def spans(model: nn.Module) -> dict[str, list[float]]:
    """Return the learned spans of each layer of a model, in tokens per head."""
    return {
        name: module.spans().tolist()
        for name, module in model.named_modules()
        if isinstance(module, AdaptiveSpan)
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSpanConfig(LearnedSpanConfig):
    """Dynamic span attention: each token predicts how far back every head attends.

    The layout of each run of queries is as wide as its widest span. The loss is the mean of z over heads and
    non-padding tokens. Deviation: the paper reads the layer's input x_i; a mechanism gets only its
    projection, the query q_i of the head (after any rotation by position), so v_h has D weights per head
    instead of E. Cost: the same as adaptive spans, plus a lookup of z for each score.

    Spans are in tokens: a span of 0 still includes `ramp` - 1 keys next to the token, with decreasing weight.
    """

    initial: float = -4.0  # the first b, which gives spans of 1.8 % of max_span

    kind: ClassVar[str] = "dynamic_span"

    def build(self, num_heads: int, head_size: int) -> "DynamicSpan":
        return DynamicSpan(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["DynamicSpanConfig", ...]:
        return cls(max_span=6, ramp=2, initial=0.0), cls(max_span=300, ramp=3)


class DynamicSpan(SpanAttention):
    """Softmax attention with spans [B, H, Tq] predicted by the queries, and a KV cache as state."""

    def __init__(self, config: DynamicSpanConfig, num_heads: int, head_size: int):
        super().__init__()
        self.config = config
        self.vector = nn.Parameter(torch.zeros(num_heads, head_size))
        self.bias = nn.Parameter(torch.full((num_heads,), config.initial))

    def spans(self, q: Tensor) -> Tensor:
        """Return the spans z [B, H, Tq] of queries [B, H, Tq, D], in tokens."""
        exact = torch.promote_types(q.dtype, torch.float32)  # half precision cannot represent long spans
        q, vector, bias = (x.to(exact) for x in (q, self.vector, self.bias))
        logits = torch.einsum("bhtd,hd->bht", q, vector) + bias.unsqueeze(1)
        return self.config.max_span * torch.sigmoid(logits)

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return softmax attention with log m(d) added to the scores; adds the auxiliary loss."""
        k, v, state = appended(state, k, v)
        spans = self.spans(q)
        record_mark("span (tokens)", lambda: spans, "queries")
        add_auxiliary_loss("span", self.config.penalty * _mean_span(spans, context))
        pattern, log_mask = self._pattern(spans), self._log_mask(spans, context)
        return self.attend(q, k, v, context, position, pattern=pattern, log_mask=log_mask), state

    def _log_mask(self, spans: Tensor, context: Context) -> ScoreMod:
        """Return a score function that adds log m(d)."""
        ramp, most = self.config.ramp, self.config.max_span

        @step("span: log m(distance)")
        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = context.distance(q_idx, kv_idx).abs()
            seen = log_span_mask(spans[b, h, q_idx], distance, ramp)
            return score + torch.where(distance <= most, seen, -torch.inf)

        return add

    def _pattern(self, spans: Tensor) -> Spans:
        """Return a pattern with the widest span over the batch in each run of queries, per head."""
        most = self.config.max_span
        if torch.compiler.is_compiling():  # values cannot be read while tracing
            return Spans(((most,),))
        farthest = spans.detach().float().amax(0)  # [H, Tq]
        if farthest.is_meta:  # no values on the meta device: use the spans of a new model
            first = torch.tensor(self.config.initial, device="cpu").sigmoid()
            farthest = (most * first).expand(farthest.shape)
        # Runs of SPAN_MULTIPLE queries share a span, so that a layout has few rows.
        padded = F.pad(farthest, (0, -farthest.shape[1] % SPAN_MULTIPLE))
        runs = padded.unflatten(1, (-1, SPAN_MULTIPLE)).amax(2)
        longest = (runs + self.config.ramp).ceil().clamp(max=most)
        steps = (longest / SPAN_MULTIPLE).ceil().long() * SPAN_MULTIPLE
        return Spans(tuple(map(tuple, steps.tolist())), SPAN_MULTIPLE)


def _mean_span(spans: Tensor, context: Context) -> Tensor:
    """Return the mean of spans [B, H, Tq] over heads and non-padding tokens."""
    if context.q_valid is None:
        return spans.mean()
    valid = context.q_valid.unsqueeze(1)
    return (spans * valid).sum() / (valid.sum() * spans.shape[1]).clamp_min(1)
