"""Adaptive spans: every head learns how far back it attends, and the runtime decreases with the spans.

    p_ij = m(d) e^(s_ij) / sum_r m(d_ir) e^(s_ir)        m(x) = clip((ramp + z_h - x) / ramp, 0, 1)

with the distance d = |i - j| and the learned span z_h of head h: a bias of log m(d) on the scores. A layer
computes only the keys within ramp + z_h, with heads of equal width together. Training adds the auxiliary loss
penalty * mean_h z_h for each layer. Sukhbaatar et al. 2019, sections 2.2 and 3.

Deviations: an encoder, which the paper does not have, attends equally far on both sides. z is clamped to
0..max_span in the forward pass and a quadratic loss keeps its parameter near this range; the paper's code
clamps the parameter after each step. Cost: 2 * min(ramp + z_h, max_span) * (D + Dv) per query, twice that in
an encoder.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import PositionTerms
from polyformer.attention.mechanisms.spans import (
    SPAN_MULTIPLE,
    LearnedSpanConfig,
    SpanAttention,
    Spans,
    log_span_mask,
)
from polyformer.core.auxiliary_losses import add_auxiliary_loss
from polyformer.core.instrumentation import record_mark
from polyformer.core.kv_cache import appended
from polyformer.core.ranges import UnitFloat
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig(LearnedSpanConfig):
    """Adaptive span attention: each head learns how far back it attends.

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
