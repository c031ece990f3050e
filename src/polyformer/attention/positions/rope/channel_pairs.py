"""Rotation of pairs of channels, the operation of RoPE, also inside a bounded cache.

    (a, b) becomes (a cos x - b sin x, b cos x + a sin x)        for each pair of channels, with its angle x

A query at position i is the last of the C entries of a cache (`SinkCache`): for its products with the first
tokens it is rotated further, by min(i, C - 1) - i positions. For a single query, the first keys can be
rotated by as many positions instead.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Literal

import torch
from torch import Tensor

from polyformer.attention.positions.sink_cache import SinkCache
from polyformer.core.sequence.context import Context

Layout = Literal["halves", "pairs"]
Angles = Callable[[Tensor], Tensor]
"""A function of positions [B or 1, 1, T, 1] that returns angles [B or 1, 1, T, W/2]."""

Positions = Callable[[Tensor, Context], Tensor]


@dataclasses.dataclass(frozen=True)
class ChannelPairs:
    """The first `width` channels W of every head in pairs: m and m + W/2 ("halves"), or 2m and 2m + 1."""

    layout: Layout
    width: int

    def cos_sin(self, angles: Tensor, dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return cos and sin (with the signs of a pair) [B or 1, 1, T, W] of angles [B or 1, 1, T, W/2]."""
        cos, sin = angles.cos(), angles.sin()
        waves = self._join(cos, cos), self._join(-sin, sin)
        return (waves[0] * size).to(dtype), (waves[1] * size).to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [B, H, T, D] with its first W channels rotated."""
        # x cos plus the swapped pair times the signed sin.
        rotated = x[..., : self.width]
        if self.layout == "halves":
            others = rotated.roll(self.width // 2, -1)
        else:
            others = self._join(rotated[..., 1::2], rotated[..., ::2])
        rotated = torch.addcmul(rotated * cos, others, sin)
        return rotated if self.width == x.shape[-1] else torch.cat([rotated, x[..., self.width :]], -1)

    def rotate_further(
        self,
        x: Tensor,
        angles: Angles | None,
        positions: Positions,
        context: Context,
        key: tuple[Hashable, ...],
    ) -> Tensor:
        """Return x [B, H, T, D] rotated by the angles at its positions, which layers share by `key`."""
        if angles is None:
            return x
        make = lambda: self.cos_sin(angles(positions(x, context)), x.dtype)  # noqa: E731
        return self.rotate(x, *context.once((*key, self, x.dtype, x.device, positions), make))

    def _join(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the channels [..., W] of the first and the second members [..., W/2] of all pairs."""
        if self.layout == "halves":
            return torch.cat([first, second], -1)
        return torch.stack([first, second], -1).flatten(-2)


@dataclasses.dataclass(frozen=True, eq=False)
class RotationInCache:
    """The rotations of a layer inside a cache.

    theta: a function that returns the angles [W/2] between two neighbouring positions; `key` identifies them.
    """

    pairs: ChannelPairs
    theta: Callable[[], Tensor]
    cache: SinkCache
    key: Hashable

    def queries(self, q: Tensor, context: Context) -> Tensor:
        """Return R_(C - 1 - i) q_i for the queries at positions i >= C, the others as they are."""
        last = self.cache.size - 1

        def angles(pos: Tensor) -> Tensor:
            return (pos.clamp_max(last) - pos) * self.theta()

        key = "in cache", self.key, last
        return self.pairs.rotate_further(q, angles, query_positions, context, key)

    def keys(self, q: Tensor, k: Tensor, context: Context) -> Tensor | None:
        """Return R_(i - C + 1) k_j of the first tokens j, for a query at position i >= C, and other keys.

        None if the slots of the first tokens are not known.
        """
        first, last = self.cache.first, self.cache.size - 1
        slots = context.prefix or (first if context.kv_pos is None else 0)
        if not slots:
            return None

        def angles(pos: Tensor) -> Tensor:
            further = (query_positions(q, context) - last).clamp_min(0)
            return (further * (pos < first)) * self.theta()

        key = "keys in cache", self.key, last
        turned = self.pairs.rotate_further(k[:, :, :slots], angles, key_positions, context, key)
        return torch.cat([turned, k[:, :, slots:]], 2)


def query_positions(q: Tensor, context: Context) -> Tensor:
    """Return the positions of the queries, [B or 1, 1, Tq, 1]."""
    rows, slots = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[2]))
    # The axis of size 1 before Tq broadcasts over heads.
    return context.query_position(rows.unsqueeze(1), slots).unsqueeze(-1).unsqueeze(-3)


def key_positions(k: Tensor, context: Context) -> Tensor:
    """Return the positions of the keys, [B or 1, 1, Tk, 1]."""
    rows, slots = (torch.arange(n, device=k.device) for n in (k.shape[0], k.shape[2]))
    return context.key_position(rows.unsqueeze(1), slots).unsqueeze(-1).unsqueeze(-3)
