"""Learned positions of an image: a vector for the row and a vector for the column are added to the input.

The result is x_p + rows[p // (W C)] + columns[p // C % W] (+ channels[p % C]) for place p of an image of
H x W pixels of C colours in raster order. There are (H + 1 + W + C) x E parameters: the place after the last
pixel, which a decoder with a start token reaches, has an extra row. Parmar et al. 2018 (Image Transformer),
section 3.1.

In a Vision Transformer pixels are patches, and the tokens before them, such as a class token, get no vector.

Deviation: the paper uses half of the width for the row and the other half for column and colour. Here each
vector has the full width, and the layers above can learn to separate them.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.positions.base import Position, PositionConfig, Shape, readable_length
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig(PositionConfig):
    """Grid positions: learned vectors for the row and column of a pixel are added to the input.

    `shape`: (height, width) or (height, width, channels) of the image.
    """

    shape: tuple[PositiveInt, ...]

    kind: ClassVar[str] = "grid"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 3.1"

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise InputError(f"grid: shape: expected 2 or 3 numbers, got {list(self.shape)}")

    def build(self, shape: Shape) -> "Grid":
        if shape.image is not None and self.shape != shape.image[1:]:
            _, height, width = shape.image
            raise InputError(
                f"position.shape: expected {[height, width]}, the rows and columns of patches, "
                f"got {list(self.shape)}"
            )
        return Grid(shape.hidden_size, self.shape, 0 if shape.image is None else shape.image.first)

    @classmethod
    def examples(cls) -> tuple["GridConfig", ...]:
        return cls(shape=(40, 3)), cls(shape=(14, 3, 3))


class Grid(Position):
    """Tables [H + 1, E], [W, E] and, with colours, [C, E]; the first `first` tokens get no vector."""

    embeds_layers = False

    def __init__(self, hidden_size: int, shape: tuple[int, ...], first: int = 0):
        super().__init__()
        self.first = first
        # An extra row: with a start token, a decoder reaches the place after the last pixel.
        height, *others = shape
        self.sizes = (height + 1, *others)
        self.places = math.prod(shape)
        self.max_positions = first + self.places + 1
        self.tables = nn.ModuleList(nn.Embedding(size, hidden_size) for size in self.sizes)

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + rows[..] + columns[..] + channels[..] at the first layer, and x at all others."""
        if layer:
            return x
        place = pos - self.first
        length = readable_length(place)
        if length > self.places + 1:
            shape = "x".join(str(size) for size in (self.sizes[0] - 1, *self.sizes[1:]))
            raise InputError(
                f"input of {length} tokens: a grid of {shape} has {self.places} places and one for a start "
                "token; set position.shape to the shape of your images"
            )
        rest = place.clamp_min(0) if self.first else place
        before = x
        # The last axis varies fastest; after it, the quotient is the index of the axis before.
        for table, size in list(zip(self.tables, self.sizes))[:0:-1]:
            x = x + table(rest % size)
            rest = rest // size
        x = x + self.tables[0](rest)
        return torch.where((place < 0).unsqueeze(-1), before, x) if self.first else x
