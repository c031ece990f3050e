"""Patterns of distances alone, from two short methods: the shortest way to a new pattern as fast as any.

@dataclasses.dataclass(frozen=True)
class Near(ByDistance):
    def ends(self): return 256, 0
    def sees(self, distance): return (distance < 4) | (distance % 8 == 0)
"""

import functools
import math

import torch
from torch import Tensor

from polyformer.patterns.base import Pattern
from polyformer.patterns.implied import runs
from polyformer.patterns.layout import Keys, clip
from polyformer.sequence.context import Context


class ByDistance(Pattern, named=False):
    """Who may see whom depends on how many slots the key lies before the query; negative: after it."""

    def ends(self) -> tuple[int, int]:
        """The farthest distances seen, before and after the query: (256, 0), say; 0 or more."""
        raise NotImplementedError

    def sees(self, distance: Tensor) -> Tensor:
        """Whether a key at these distances is seen; asked between the ends only."""
        raise NotImplementedError

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance, (before, after) = context.distance(q_idx, kv_idx), self.ends()
        return (distance <= before) & (distance >= -after) & self.sees(distance)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        first, last = start + context.offset, stop - 1 + context.offset
        before, after = self.ends()
        least, greatest = _longest_run(self)
        return Keys(
            clip(first - before, last + after + 1, context.kv_len),
            clip(last - greatest, first - least + 1, context.kv_len),
        )

    def reach(self) -> tuple[int, int]:
        before, after = self.ends()
        return -after, before

    def relative(self, context: Context) -> bool:
        return True

    def step(self) -> int:
        return math.gcd(*_seen(self)) or 1


@functools.lru_cache(maxsize=256)
def _seen(pattern: ByDistance) -> tuple[int, ...]:
    """All distances seen, rising."""
    before, after = pattern.ends()
    distance = torch.arange(-after, before + 1)
    return tuple(distance[pattern.sees(distance).expand(len(distance))].tolist())


@functools.lru_cache(maxsize=256)
def _longest_run(pattern: ByDistance) -> tuple[int, int]:
    """The most distances in a row that are all seen: the least and the greatest of them."""
    _, after = pattern.ends()
    seen = torch.zeros(sum(pattern.ends()) + 1, dtype=torch.bool)
    seen[torch.tensor(_seen(pattern), dtype=torch.long) + after] = True
    start, stop = max(runs(seen), key=lambda run: run[1] - run[0], default=(1, 0))
    return start - after, stop - 1 - after
