"""Sinusoidal positions, added to the input: PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos of the same.

`layout` sets the order of the channels: sines and cosines in turn ("pairs": the paper), or all sines and then
all cosines ("halves": CTRL). With `inclusive`, as in tensor2tensor and therefore in fairseq and M2M-100, the
last of the factors is `base` itself: 10000^(i / (E/2 - 1)). If E is then odd, the last channel is zero.
There are no parameters, and the length is not limited; PE(p + k) is a fixed linear map of PE(p). Vaswani et
al. 2017, section 3.5.

PE(p) has length sqrt(E / 2). A model that adds it therefore multiplies the token vectors, initially of length
1, by sqrt(E) (section 3.4), unless `embedding.scaled` is set.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor

from polyformer.attention.positions.base import Position, PositionConfig, Shape, sinusoids
from polyformer.core.ranges import NonNegativeInt

Layout = Literal["pairs", "halves"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalConfig(PositionConfig):
    """Sinusoidal positions: sines and cosines of the position are added to the input.

    Positions count from `offset`.
    """

    layout: Layout = "pairs"
    base: Annotated[float, Gt(1)] = 10000.0
    inclusive: bool = False  # the longest wave is 2 pi base, not just short of it
    offset: NonNegativeInt = 0

    kind: ClassVar[str] = "sinusoidal"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.5"

    def build(self, shape: Shape) -> "Sinusoidal":
        return Sinusoidal(shape.input_size, self)

    @classmethod
    def examples(cls) -> tuple["SinusoidalConfig", ...]:
        return cls(), cls(layout="halves", base=500.0, inclusive=True, offset=2)


class Sinusoidal(Position):
    """The module that adds the sinusoids to the input of the first layer."""

    embeds_layers = False

    adds_sinusoids = True

    def __init__(self, hidden_size: int, config: SinusoidalConfig):
        super().__init__()
        self.hidden_size, self.config = hidden_size, config

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + PE(p + offset) at the first layer, and x at all others."""
        if layer:
            return x
        return x + self._waves(pos + self.config.offset if self.config.offset else pos).to(x.dtype)

    def _waves(self, pos: Tensor) -> Tensor:
        """Return PE [..., E] of positions that already include `offset`."""
        width, base = self.hidden_size, self.config.base
        if self.config.inclusive:
            width -= width % 2
            # The exponent 2i / width of the last pair becomes 1: its factor is the original base.
            base **= width / max(width - 2, 1)
        waves = sinusoids(pos, width, base)
        if self.config.layout == "halves":
            waves = torch.cat([waves[..., ::2], waves[..., 1::2]], -1)
        return F.pad(waves, (0, self.hidden_size - width)) if width < self.hidden_size else waves
