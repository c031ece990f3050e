"""Learned positions of an image: a vector for the row and one for the column, added to the input.

x_p + rows[p // (W C)] + columns[p // C % W] (+ channels[p % C]) for place p of an image of H x W pixels of C
colours in raster order. (H + 1 + W + C) x E parameters: the place after the last pixel, which a decoder with
a start token reaches, has a row of its own. Parmar et al. 2018 (Image Transformer), section 3.1.

Deviation: the paper gives the row one half of the width and column and colour the other; here all have the
whole width, and the layers above may part them.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.position.base import Position, PositionConfig, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig(PositionConfig):
    """Rows and columns of an image; `shape`: (height, width) or (height, width, channels)."""

    shape: tuple[int, ...]

    kind: ClassVar[str] = "grid"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 3.1"

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise InputError(f"grid: shape: expected 2 or 3 numbers of 1 or more, got {list(self.shape)}")

    def build(self, shape: Shape) -> "Grid":
        """The module of the scheme, for a whole stack."""
        return Grid(shape.hidden_size, self.shape)

    @classmethod
    def examples(cls) -> tuple["GridConfig", ...]:
        """Small instances that the contract tests run."""
        return cls(shape=(40, 3)), cls(shape=(14, 3, 3))


class Grid(Position):
    """Tables [H + 1, E], [W, E] and, with colours, [C, E]."""

    def __init__(self, hidden_size: int, shape: tuple[int, ...]):
        super().__init__()
        height, *others = shape
        self.sizes = (height + 1, *others)
        self.places = math.prod(shape)
        self.max_positions = self.places + 1
        self.tables = nn.ModuleList(nn.Embedding(size, hidden_size) for size in self.sizes)

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """x_p + rows[..] + columns[..] + channels[..], at the first layer."""
        if layer:
            return x
        self._check(pos)
        for table, size in list(zip(self.tables, self.sizes))[:0:-1]:
            x = x + table(pos % size)
            pos = pos // size
        return x + self.tables[0](pos)

    def _check(self, pos: Tensor) -> None:
        """Raises where looking is cheap; elsewhere the lookup raises."""
        if pos.device.type != "cpu" or torch.compiler.is_compiling() or not pos.numel():
            return
        length = int(pos.max()) + 1
        if length > self.places + 1:
            shape = "x".join(str(size) for size in (self.sizes[0] - 1, *self.sizes[1:]))
            raise InputError(
                f"input of {length} tokens: a grid of {shape} has {self.places} places and one for a start "
                "token; give the shape of your images to position.shape"
            )
