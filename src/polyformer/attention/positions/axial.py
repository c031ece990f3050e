"""Axial positions: the positions are folded into a grid, with a small table of vectors for each axis.

    p = (r_1 n_2 + r_2) n_3 + ..        vector_p = concat(W_1[r_1], W_2[r_2], ..)        W_i: [n_i, d_i]

A text of up to n_1 n_2 .. tokens costs n_1 d_1 + n_2 d_2 + .. parameters instead of n_1 n_2 .. E. A position
beyond the grid is an error. In training, transformers applies dropout to whole rows of the grid; here dropout
applies only to the embedding sum. Kitaev et al. 2020 (Reformer), appendix D, "axial positional embeddings".
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.positions.base import Position, PositionConfig, Shape, check_positions
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxialConfig(PositionConfig):
    """Axial positions: the vectors of the axes of a grid are concatenated and added to the input.

    `grid`: the lengths n_i of the axes. `widths`: d_i; by default a quarter of E for each axis except the
    last, which has the remaining channels.
    """

    grid: tuple[PositiveInt, ...] = (64, 64)
    widths: tuple[PositiveInt, ...] | None = None

    kind: ClassVar[str] = "axial"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Kitaev et al. 2020 (Reformer), appendix D"

    def __post_init__(self) -> None:
        if len(self.grid) < 2:
            raise InputError(f"grid: expected the lengths of 2 axes or more, got {self.grid}")
        if self.widths is not None and len(self.widths) != len(self.grid):
            raise InputError(f"widths: expected one for each of the {len(self.grid)} axes, got {self.widths}")

    @classmethod
    def examples(cls) -> tuple["AxialConfig", ...]:
        return cls(grid=(8, 5)), cls(grid=(3, 4, 5))

    def with_max_positions(self, before: int, after: int) -> "AxialConfig":
        """Return a grid with a longer first axis: the coordinates of earlier positions do not change."""
        row = math.prod(self.grid[1:])
        return dataclasses.replace(self, grid=(max(self.grid[0], -(-after // row)), *self.grid[1:]))

    def build(self, shape: Shape) -> "Axial":
        return Axial(self, shape.input_size)


class Axial(Position):
    """A table [n_i, d_i] for each axis."""

    embeds_layers = False

    def __init__(self, config: AxialConfig, width: int):
        super().__init__()
        self.grid = config.grid
        quarters = (width // 4,) * (len(config.grid) - 1)
        widths = config.widths or (*quarters, width - sum(quarters))
        if sum(widths) != width or min(widths) < 1:
            raise InputError(f"widths: expected numbers that add up to hidden_size {width}, got {widths}")
        self.tables = nn.ModuleList(nn.Embedding(n, d) for n, d in zip(config.grid, widths, strict=True))
        self.max_positions = math.prod(config.grid)

    def position_tables(self) -> dict[str, int]:
        """Return the table of the first axis: only this axis grows with the number of positions."""
        return {"tables.0.weight": 0}

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + concat(W_1[r_1], W_2[r_2], ..) at the first layer, and x at all others."""
        if layer:
            return x
        check_positions(pos, math.prod(self.grid))
        # The last axis varies fastest, so its coordinate is the remainder of the first division.
        vectors: list[Tensor] = []
        for length, table in zip(reversed(self.grid), reversed(self.tables)):
            vectors.append(table(pos % length))
            pos = pos // length
        return x + torch.cat(vectors[::-1], -1)
