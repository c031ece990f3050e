"""Links: a table of the blocks of keys that each block of queries sees, as other libraries store it.

Cost: size keys per query for each entry of its row; the mask is looked up in a matrix of blocks by blocks.
"""

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern, TabulatedPattern
from polyformer.attention.patterns.block_base import BlockPattern
from polyformer.attention.patterns.structure import BlockNeeds, Structure
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Links(TabulatedPattern, BlockPattern):
    """Block links: block i of `size` positions sees the blocks `table[i]`, or no block if it has no row.

    The random blocks of transformers' BigBird are copied as one `Links` per head. Raises `InputError` for a
    size below 1, an empty table and negative numbers.
    """

    size: PositiveInt
    table: tuple[tuple[int, ...], ...]

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2"

    def __post_init__(self) -> None:
        super().__post_init__()
        rows: Iterable[Iterable[int]] = self.table
        table = tuple(tuple(sorted({int(block) for block in row})) for row in rows)
        if not table or any(row and row[0] < 0 for row in table):
            raise InputError(f"Links: table: expected a list of block numbers for each block, got {table}")
        object.__setattr__(self, "table", table)

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the lookup of query and key block in a matrix."""
        return LinkMatrix(self.size, self._matrix(device))

    def visible_blocks(self, context: Context, block: int, last: int) -> tuple[int, ...]:
        """Return table[block]."""
        return self.table[block] if block < len(self.table) else ()

    @property
    def structure(self) -> Structure:
        """The rows of the table."""
        rows = self.table
        return Structure(
            blocks=BlockNeeds(self.size, links=lambda count: [*rows, *[()] * (count - len(rows))][:count])
        )

    def _matrix(self, device: torch.device) -> Tensor:
        """Return the visible pairs, [blocks + 1, blocks + 1]; the last row and column are blocks beyond."""
        pairs = [(i, j) for i, row in enumerate(self.table) for j in row]
        matrix = torch.zeros(len(self.table) + 1, 2 + max([0, *(j for _, j in pairs)]), dtype=torch.bool)
        for i, j in pairs:
            matrix[i, j] = True
        return matrix.to(device, non_blocking=True)

    @classmethod
    def examples(cls) -> tuple["Links", ...]:
        return (cls(3, ((0,), (0, 2), (), (1, 3))),)

    @classmethod
    def picture(cls) -> tuple["Links", Context]:
        """Return six blocks with a few links."""
        return cls(8, ((0,), (0, 2), (5,), (1, 3, 4), (), (0, 5))), Context(48, 48)


@dataclasses.dataclass(frozen=True, eq=False)
class LinkMatrix(BlockPattern, named=False):
    """Block links in a matrix [blocks + 1, blocks + 1] of bool; its last row and column are False."""

    size: int
    matrix: Tensor

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return matrix[query, key]."""
        height, width = self.matrix.shape
        # Blocks beyond the table read the last row or column, which are False.
        return self.matrix[query.clamp_max(height - 1), key.clamp_max(width - 1)]
