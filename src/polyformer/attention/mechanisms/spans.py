"""Shared parts of adaptive and dynamic spans: options, the pattern of the keys in reach, the soft mask m.

    p_ij = m(d) e^(s_ij) / sum_r m(d_ir) e^(s_ir)        m(x) = clip((ramp + z - x) / ramp, 0, 1)

with the distance d = |i - j| and a span z, in tokens. Sukhbaatar et al. 2019, section 2.1.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig, PositionTerms
from polyformer.attention.patterns.base import Pattern, ScoreMod, TabulatedPattern
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.attention.patterns.score_steps import chain_score_mods
from polyformer.core.host_values import tensor_on
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ranges import NonNegativeFloat, PositiveInt, Probability
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach

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

    def reach(self) -> Reach:
        """Return the widest span."""
        return Reach(max(span for row in self.spans for span in row))

    def relative(self, context: Context) -> bool:
        """Return whether all heads and runs are alike."""
        return self.run is None and len(self.spans) == 1


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
