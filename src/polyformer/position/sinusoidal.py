"""Sinusoidal positions, added to the input: PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos of the same.

No parameters, any length; PE(p + k) is a fixed linear map of PE(p). Vaswani et al. 2017, section 3.5.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.position.base import Position, PositionConfig, Shape, sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalConfig(PositionConfig):
    """Positions count from 0."""

    base: float = 10000.0

    kind: ClassVar[str] = "sinusoidal"
    row: ClassVar[str] = "P1"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.5"

    def __post_init__(self) -> None:
        if self.base <= 1:
            raise InputError(f"base: expected a wavelength factor above 1, got {self.base}")

    def build(self, shape: Shape) -> "Sinusoidal":
        return Sinusoidal(shape.input_size, self)


class Sinusoidal(Position):
    """Adds the sinusoids to the first layer's input."""

    def __init__(self, hidden_size: int, config: SinusoidalConfig):
        super().__init__()
        self.hidden_size, self.base = hidden_size, config.base

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        return x if layer else x + sinusoids(pos, self.hidden_size, self.base).to(x.dtype)
