"""Attention spans per head, the same on both sides, from learned or computed numbers."""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.core.sequence.context import Context

SPAN_MULTIPLE = 64
"""Spans are rounded up to a multiple of this, so that there are few layouts and heads can share them."""


@dataclasses.dataclass(frozen=True)
class Spans(Pattern, named=False):
    """Attention spans: head h sees keys up to `spans[h][r]` positions away from the queries of run r.

    Runs are `run` queries long; None means a single run. With one row of spans all heads are alike.
    """

    spans: tuple[tuple[int, ...], ...]
    run: int | None = None

    def head_pattern(self, head: int) -> Pattern:
        """Return the spans of one head."""
        return self if len(self.spans) == 1 else Spans((self.spans[head],), self.run)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether |i - j| <= spans[h][i // run]."""
        spans = torch.tensor(self.spans, device=kv_idx.device)
        # The span of each query: its head selects the row, its run the column.
        run = torch.zeros_like(q_idx) if self.run is None else q_idx // self.run
        span = spans[h if len(self.spans) > 1 else torch.zeros_like(h), run]
        return context.distance(q_idx, kv_idx).abs() <= span

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

    def relative(self, context: Context) -> bool:
        """Return whether all heads and runs are alike."""
        return self.run is None and len(self.spans) == 1


def round_up_span(span: float) -> int:
    """Return `span` rounded up to a multiple of `SPAN_MULTIPLE`."""
    return -int(-span // SPAN_MULTIPLE) * SPAN_MULTIPLE


def log_span_mask(spans: Tensor, distance: Tensor, ramp: int) -> Tensor:
    """Return log clip((ramp + span - distance) / ramp, 0, 1), minus infinity for invisible keys."""
    seen = ((ramp + spans - distance) / ramp).clamp(max=1.0)
    tiny = torch.finfo(seen.dtype).tiny
    # The clamp keeps the gradient of the logarithm finite where -inf is selected.
    return torch.where(seen > 0, seen.clamp_min(tiny).log(), -torch.inf)
