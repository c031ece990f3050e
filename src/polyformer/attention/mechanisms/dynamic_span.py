"""Dynamic spans: every token predicts how far back each head attends.

    z_t = max_span * sigmoid(v_h . q_t + b_h)        p_ij = m(d) e^(s_ij) / sum_r m(d_ir) e^(s_ir)
    m(x) = clip((ramp + z_i - x) / ramp, 0, 1)       with the distance d = |i - j|

The layout of each run of queries is as wide as its widest span. Training adds the auxiliary loss penalty
times the mean of z over heads and non-padding tokens, for each layer. Sukhbaatar et al. 2019, section 2.2.

Deviations: the paper reads the layer's input x_t; a mechanism gets only its projection, the query q_t of the
head (after any rotation by position), so v_h has D weights per head instead of E. An encoder, which the paper
does not have, attends equally far on both sides. Cost: the same as adaptive spans, plus a lookup of z for
each score.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import PositionTerms
from polyformer.attention.mechanisms.spans import (
    SPAN_MULTIPLE,
    LearnedSpanConfig,
    SpanAttention,
    Spans,
    log_span_mask,
)
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.core.auxiliary_losses import add_auxiliary_loss
from polyformer.core.instrumentation import record_mark
from polyformer.core.kv_cache import appended
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSpanConfig(LearnedSpanConfig):
    """Dynamic span attention: each token predicts how far back every head attends.

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
