"""How far each head looks, on both sides, by the numbers that a mechanism has learned or computed."""

import dataclasses

import torch
from torch import Tensor

from polyformer.patterns.base import Pattern
from polyformer.patterns.layout import Keys, clip
from polyformer.sequence.context import Context

GRAIN = 64
"""Reaches are rounded up to a multiple of this, so that layouts are few and heads share them."""


@dataclasses.dataclass(frozen=True)
class Reach(Pattern, named=False):
    """Head h sees keys up to `reaches[h][r]` positions away from the queries of run r.

    Runs are `run` queries long; None is one run for all. With one row of reaches all heads are alike.
    """

    reaches: tuple[tuple[int, ...], ...]
    run: int | None = None

    def of_head(self, head: int) -> Pattern:
        return self if len(self.reaches) == 1 else Reach((self.reaches[head],), self.run)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        reaches = torch.tensor(self.reaches, device=kv_idx.device)
        run = torch.zeros_like(q_idx) if self.run is None else q_idx // self.run
        reach = reaches[h if len(self.reaches) > 1 else torch.zeros_like(h), run]
        return context.distance(q_idx, kv_idx).abs() <= reach

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        runs = slice(None) if self.run is None else slice(start // self.run, (stop - 1) // self.run + 1)
        own = [reach for row in self.reaches for reach in row[runs]]
        first, last = start + context.offset, stop - 1 + context.offset
        return Keys(
            clip(first - max(own), last + max(own) + 1, context.kv_len),
            clip(last - min(own), first + min(own) + 1, context.kv_len),
        )

    def relative(self, context: Context) -> bool:
        return self.run is None and len(self.reaches) == 1


def rounded(reach: float) -> int:
    """`reach` rounded up to a multiple of `GRAIN`."""
    return -int(-reach // GRAIN) * GRAIN


def fading(spans: Tensor, distance: Tensor, ramp: int) -> Tensor:
    """log clip((ramp + span - distance) / ramp, 0, 1), minus infinity where nothing is seen."""
    seen = ((ramp + spans - distance) / ramp).clamp(max=1.0)
    tiny = torch.finfo(seen.dtype).tiny
    return torch.where(seen > 0, seen.clamp_min(tiny).log(), -torch.inf)
