"""Learned positions: a table of vectors is added to the input of the first layer, or a table per layer.

Each table has max_positions x E parameters; a position beyond the table is an error. Vaswani et al. 2017,
section 3.5 (table 3, row E); per layer: Al-Rfou et al. 2018, section 3.3.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from polyformer.attention.positions.base import Position, PositionConfig, Shape, check_positions
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedConfig(PositionConfig):
    """Learned positions: a table of vectors is added to the input of the first layer.

    The first `offset` rows, which RoBERTa and BART have, belong to no position.
    """

    offset: NonNegativeInt = 0

    kind: ClassVar[str] = "learned"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Vaswani et al. 2017, table 3, row E"

    def build(self, shape: Shape) -> "Learned":
        return Learned([shape.input_size], shape.max_positions, self.offset)

    @classmethod
    def examples(cls) -> tuple["LearnedConfig", ...]:
        return cls(), cls(offset=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedPerLayerConfig(PositionConfig):
    """Learned positions per layer: a table of vectors is added to the input of every layer."""

    kind: ClassVar[str] = "learned_per_layer"
    paper: ClassVar[str] = "Al-Rfou et al. 2018, section 3.3"

    def build(self, shape: Shape) -> "Learned":
        # The first layer adds to the embedding sum, which may be narrower than the stack.
        widths = [shape.input_size] + [shape.hidden_size] * (shape.num_layers - 1)
        return Learned(widths, shape.max_positions)


class Learned(Position):
    """A table [offset + max_positions, E] for each of `widths`; the input of further layers is unchanged."""

    def __init__(self, widths: list[int], max_positions: int, offset: int = 0):
        super().__init__()
        if max_positions < 1:
            raise InputError(
                f"max_position_embeddings: learned positions need 1 or more, got {max_positions}"
            )
        self.tables = nn.ModuleList(nn.Embedding(offset + max_positions, width) for width in widths)
        self.max_positions, self.offset = max_positions, offset
        self.embeds_layers = len(widths) > 1

    def position_tables(self) -> dict[str, int]:
        """Return all tables; the first `offset` rows of each table belong to no position."""
        return {f"tables.{i}.weight": self.offset for i in range(len(self.tables))}

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + table[p + offset] with the table of the layer."""
        table = self.tables._modules.get(str(layer))  # faster than an index
        if table is None:
            return x
        if self.max_positions is not None:
            check_positions(pos, self.max_positions)
        # Positions [T] or [B, T] give vectors [T, E] or [B, T, E], which broadcast to x.
        return x + table(pos + self.offset if self.offset else pos)
