"""xPos: rotary positions whose pairs of channels fade with the distance of query and key.

    q_i . k_j = sum_m zeta_m^((i - j) / b) (R_i q)_m . (R_j k)_m        pair m of channels, R of `rope`
    zeta_m    = (2 m / D + gamma) / (1 + gamma), m = 0 .. D/2 - 1      pairs that turn fast fade fast

Queries are multiplied by zeta^(i / b) and keys by zeta^(-j / b), so that a KV cache has keys that need no
further change. These factors grow with the position: float32 has room for about 70 b positions with gamma =
0.4, float16 for 8 b. Later keys, which only an encoder sees, grow by the same factors instead of fading.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site, angle_dtype
from polyformer.attention.positions.rope import Base, ChannelPairs, query_positions
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveFloat
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class XposConfig(PositionConfig):
    """xPos: rotary positions with a decay of each pair of channels by the distance.

    It is a scheme beside `rope` and not an option of it, so that files of other libraries, which know `rope`
    alone, cannot lose the decay.

    `base`: of the angles. `gamma`: the smallest decay of the fastest pair is gamma / (1 + gamma) for each
    `scale_base` positions.
    """

    base: Base = 10000.0
    gamma: PositiveFloat = 0.4
    scale_base: PositiveFloat = 512.0

    kind: ClassVar[str] = "xpos"
    paper: ClassVar[str] = "Sun et al. 2022 (Length-Extrapolatable Transformer), section 3"

    @classmethod
    def examples(cls) -> tuple["XposConfig", ...]:
        """Return a decay that short texts show."""
        return (cls(base=500.0, scale_base=20.0),)

    def build(self, shape: Shape) -> "Xpos":
        return Xpos(self, shape.head_size)


class Xpos(Position):
    """The module that rotates and scales the queries and new keys of every layer."""

    def __init__(self, config: XposConfig, head_size: int):
        super().__init__()
        if head_size % 2:
            raise InputError(f"head_size: 'xpos' rotates pairs of channels, expected 2 n, got {head_size}")
        self.config, self.width = config, head_size
        self.pairs = ChannelPairs("halves", head_size)

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return zeta^(i / b) R_i q_i and zeta^(-j / b) R_j k_j."""
        waves = context.once(
            ("xpos", self.config, self.width, q.dtype, q.device), lambda: self._waves(q, context)
        )
        return self.pairs.rotate(q, *waves[:2]), self.pairs.rotate(k, *waves[2:])

    def _waves(self, q: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the scaled cos and sin [B or 1, 1, Tq, D] of the queries, then those of the keys."""
        config, dtype = self.config, angle_dtype(q.device)
        even = torch.arange(0, self.width, 2, device=q.device, dtype=dtype) / self.width
        pos = query_positions(q, context).to(dtype)
        cos, sin = self.pairs.cos_sin(pos * config.base**-even, dtype)
        log_decay = ((even + config.gamma) / (1 + config.gamma)).log() * (pos / config.scale_base)
        growth = torch.cat([log_decay, log_decay], -1).exp()  # of both channels of each pair
        waves = cos * growth, sin * growth, cos / growth, sin / growth
        q_cos, q_sin, k_cos, k_sin = (wave.to(q.dtype) for wave in waves)
        return q_cos, q_sin, k_cos, k_sin
