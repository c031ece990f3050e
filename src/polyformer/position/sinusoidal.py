"""Sinusoidal positions, added to the input: PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos of the same.

`layout` says where they stand: sines and cosines in turn ("pairs": the paper), or all sines and then all
cosines ("halves": CTRL). In tensor2tensor, and so in fairseq and M2M-100, the last of the factors is `base`
itself (`inclusive`): 10000^(i / (E/2 - 1)), and where E is odd the last channel is zero.
No parameters, any length; PE(p + k) is a fixed linear map of PE(p). Vaswani et al. 2017, section 3.5.

PE(p) has length sqrt(E / 2). Where it is added, token vectors, of length 1 at first, are therefore multiplied
by sqrt(E) (section 3.4), unless `embedding.scaled` says otherwise.
"""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.position.base import Position, PositionConfig, Shape, sinusoids

Layout = Literal["pairs", "halves"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalConfig(PositionConfig):
    """Positions count from `offset`."""

    layout: Layout = "pairs"
    base: float = 10000.0
    inclusive: bool = False  # the longest wave is 2 pi base, not just short of it
    offset: int = 0

    kind: ClassVar[str] = "sinusoidal"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.5"

    def __post_init__(self) -> None:
        if self.layout not in ("pairs", "halves"):
            raise InputError(f"layout: expected 'pairs' or 'halves', got {quote(self.layout)}")
        if self.base <= 1:
            raise InputError(f"base: expected a wavelength factor above 1, got {self.base}")
        if self.offset < 0:
            raise InputError(f"offset: expected 0 positions or more, got {self.offset}")

    def build(self, shape: Shape) -> "Sinusoidal":
        """The module of the scheme, for a whole stack."""
        return Sinusoidal(shape.input_size, self)

    @classmethod
    def examples(cls) -> tuple["SinusoidalConfig", ...]:
        """Small instances that the contract tests run."""
        return cls(), cls(layout="halves", base=500.0, inclusive=True, offset=2)


class Sinusoidal(Position):
    """Adds the sinusoids to the first layer's input."""

    adds_sinusoids = True

    def __init__(self, hidden_size: int, config: SinusoidalConfig):
        super().__init__()
        self.hidden_size, self.config = hidden_size, config

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """x_p + PE(p + offset), at the first layer."""
        if layer:
            return x
        return x + self._waves(pos + self.config.offset if self.config.offset else pos).to(x.dtype)

    def _waves(self, pos: Tensor) -> Tensor:
        """[..., E] at positions that count from `offset`."""
        width, base = self.hidden_size, self.config.base
        if self.config.inclusive:
            width -= width % 2
            base **= width / max(width - 2, 1)
        waves = sinusoids(pos, width, base)
        if self.config.layout == "halves":
            waves = torch.cat([waves[..., ::2], waves[..., 1::2]], -1)
        return F.pad(waves, (0, self.hidden_size - width)) if width < self.hidden_size else waves
