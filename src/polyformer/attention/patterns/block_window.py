"""A window of blocks: each block of queries sees the blocks near it, as in BigBird.

Unlike in `Window`, all queries of a block see the same keys, so a tile of a layout needs no mask.
Cost: (before + 1 + after) * size keys per query.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns.block_base import BlockPattern
from polyformer.attention.patterns.structure import BlockNeeds, Structure
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach


@dataclasses.dataclass(frozen=True)
class BlockWindow(BlockPattern):
    """Block window: a query sees its block of `size` positions, `before` earlier and `after` later blocks.

    `BlockWindow(64, 1, 1)` is BigBird's window of three blocks; with 0 and 0 it is attention within a block.
    Raises `InputError` for a size below 1 or negative numbers of blocks.
    """

    size: PositiveInt
    before: NonNegativeInt = 1
    after: NonNegativeInt = 1

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), appendix D"

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return whether -after <= query - key <= before, counted in blocks."""
        # query and key are numbers of blocks, not of positions.
        return (key >= query - self.before) & (key <= query + self.after)

    def visible_blocks(self, context: Context, block: int, last: int) -> range:
        """Return the blocks block - before .. block + after, clipped to the text."""
        return range(max(0, block - self.before), min(block + self.after, last) + 1)

    @property
    def structure(self) -> Structure:
        """Whole blocks before and after: the last position of a block reaches the first that it sees."""
        reach = Reach(self.size * (self.before + 1) - 1, by_position=True)
        blocks = BlockNeeds(self.size, self.before * self.size, self.after * self.size)
        return Structure(reach=reach, blocks=blocks)

    @classmethod
    def examples(cls) -> tuple["BlockWindow", ...]:
        return cls(3), cls(2, 2, 0)
