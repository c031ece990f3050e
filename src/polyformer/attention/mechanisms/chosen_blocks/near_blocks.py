"""The blocks that a query sees whatever their content, as a pattern."""

import dataclasses

from torch import Tensor

from polyformer.attention.patterns.block_base import BlockPattern
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class NearBlocks(BlockPattern, named=False):
    """The first blocks of a document, and the blocks less than `local` from the block of the query."""

    size: int
    first: int
    local: int

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return key < first or |query - key| < local, counted in blocks."""
        return (key < self.first) | ((query - key).abs() < self.local)

    def visible_blocks(self, context: Context, block: int, last: int) -> set[int]:
        """Return the first blocks and the blocks around `block`, clipped to the text."""
        around = range(max(0, block - self.local + 1), min(block + self.local - 1, last) + 1)
        return {*range(min(self.first, last + 1)), *around}
