"""How far each head looks, on both sides, by the numbers that a mechanism has learned or computed."""

import dataclasses

import torch
from torch import Tensor

from polyformer.patterns.base import Pattern
from polyformer.patterns.layout import Keys, clip
from polyformer.sequence.context import Context

GRAIN = 64
"""Spans are rounded up to a multiple of this, so that layouts are few and heads share them."""


@dataclasses.dataclass(frozen=True)
class Spans(Pattern, named=False):
    """Head h sees keys up to `spans[h][r]` positions away from the queries of run r.

    Runs are `run` queries long; None is one run for all. With one row of spans all heads are alike.
    """

    spans: tuple[tuple[int, ...], ...]
    run: int | None = None

    def head_pattern(self, head: int) -> Pattern:
        """The spans of one head."""
        return self if len(self.spans) == 1 else Spans((self.spans[head],), self.run)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """|i - j| <= spans[h][i // run]."""
        spans = torch.tensor(self.spans, device=kv_idx.device)
        run = torch.zeros_like(q_idx) if self.run is None else q_idx // self.run
        span = spans[h if len(self.spans) > 1 else torch.zeros_like(h), run]
        return context.distance(q_idx, kv_idx).abs() <= span

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """The widest span of the queries, and the narrowest without a mask."""
        runs = slice(None) if self.run is None else slice(start // self.run, (stop - 1) // self.run + 1)
        own = [span for row in self.spans for span in row[runs]]
        first, last = start + context.offset, stop - 1 + context.offset
        return Keys(
            clip(first - max(own), last + max(own) + 1, context.kv_len),
            clip(last - min(own), first + min(own) + 1, context.kv_len),
        )

    def relative(self, context: Context) -> bool:
        """Where all heads and runs are alike."""
        return self.run is None and len(self.spans) == 1


def rounded(span: float) -> int:
    """`span` rounded up to a multiple of `GRAIN`."""
    return -int(-span // GRAIN) * GRAIN


def fading(spans: Tensor, distance: Tensor, ramp: int) -> Tensor:
    """log clip((ramp + span - distance) / ramp, 0, 1), minus infinity where nothing is seen."""
    seen = ((ramp + spans - distance) / ramp).clamp(max=1.0)
    tiny = torch.finfo(seen.dtype).tiny
    return torch.where(seen > 0, seen.clamp_min(tiny).log(), -torch.inf)
