"""A learned number for each head and distance of two patches of an image, in rows and columns.

    score_ij = q_i . k_j * scale + table[d(i, j), h]
    d(i, j) = (r_i - r_j, c_i - c_j)    of two patches of an image of H x W patches: (2 H - 1)(2 W - 1) rows
              first to patch, patch to first, first to first    of a token before the patches: 3 more rows

r and c are the row and the column of a patch, and h is the head. The last token before the patches is
followed by the patches in raster order. Bao et al. 2022 (BEiT), section 2.2, after Raffel et al. 2020 (T5).
The cost is a lookup for each pair.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site, check_positions
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridBiasConfig(PositionConfig):
    """Grid bias: a learned number for the distance of two patches, in rows and columns, is added to a score.

    Each layer has its table, or with `shared` all layers have the same. In a Vision Transformer the tokens
    before the patches, such as a class token, are the first; elsewhere these are the first `first` tokens.

    `shape`: (height, width) of the image in patches. A position beyond it is an error.
    """

    shape: tuple[PositiveInt, PositiveInt] = (14, 14)  # of 224 x 224 pixels in patches of 16 x 16
    first: NonNegativeInt = 1  # tokens before the patches
    shared: bool = False  # all layers share the table

    kind: ClassVar[str] = "grid_bias"
    paper: ClassVar[str] = "Bao et al. 2022 (BEiT), section 2.2"

    @classmethod
    def examples(cls) -> tuple["GridBiasConfig", ...]:
        return cls(shape=(40, 3)), cls(shape=(14, 9), first=2, shared=True)

    def build(self, shape: Shape) -> "GridBias":
        if shape.image is not None and shape.image != (self.first, *self.shape):
            first, height, width = shape.image
            raise InputError(
                f"position.shape, position.first: expected {[height, width]}, the rows and columns of "
                f"patches, and {first} tokens before them, got {list(self.shape)} and {self.first}"
            )
        return GridBias(self, shape)


class GridBias(Position):
    """A table [(2 H - 1)(2 W - 1) + 3, heads] for each layer, or for the stack."""

    embeds_layers = False

    def __init__(self, config: GridBiasConfig, shape: Shape):
        super().__init__()
        self.shape, self.first = config.shape, config.first
        height, width = config.shape
        self.max_positions = config.first + height * width
        self.distances = (2 * height - 1) * (2 * width - 1)
        layers = range(1 if config.shared else shape.num_layers)
        self.tables = nn.ModuleList(nn.Embedding(self.distances + 3, shape.num_heads) for _ in layers)

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x; raise `InputError` for tokens beyond the image."""
        if not layer:
            check_positions(pos, self.first + self.shape[0] * self.shape[1])
        return x

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod:
        """Return a function that computes score + table[d(i, j), h]."""
        biases = self.get_submodule(f"tables.{min(site.layer, len(self.tables) - 1)}").get_parameter("weight")
        # scores are never in half precision
        biases = biases.to(torch.promote_types(q.dtype, torch.float32))

        @step("bias of the distance in rows and columns")
        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = self.row(context.query_position(b, q_idx), context.key_position(b, kv_idx))
            return score + biases[row, h].to(score.dtype)

        return add

    def row(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the row of the table for queries at positions i and keys at positions j."""
        height, width = self.shape
        x, y = i - self.first, j - self.first
        down = torch.div(x, width, rounding_mode="floor") - torch.div(y, width, rounding_mode="floor")
        right = x % width - y % width
        row = (down + height - 1) * (2 * width - 1) + right + width - 1
        row = torch.where(x < 0, self.distances, torch.where(y < 0, self.distances + 1, row))
        return torch.where((x < 0) & (y < 0), self.distances + 2, row)
