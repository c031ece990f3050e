"""A window of blocks: each block of queries sees the blocks near it. BigBird's window.

Unlike `Window`, every query of a block sees the same keys, so a tile of a layout needs no mask.
Cost: (before + 1 + after) * size keys a query.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.patterns.block_base import BlockPattern, check_size
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class BlockWindow(BlockPattern):
    """The `before` blocks of `size` positions before a query's own, its own, and the `after` blocks after it.

    `BlockWindow(64, 1, 1)` is BigBird's window of three blocks; with 0 and 0 it is attention within a block.
    Raises `InputError` for a size below 1 or negative numbers of blocks.
    """

    size: int
    before: int = 1
    after: int = 1

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), appendix D"

    def __post_init__(self) -> None:
        check_size("BlockWindow", size=self.size)
        if self.before < 0 or self.after < 0:
            raise InputError(
                f"BlockWindow: before and after count blocks, expected 0 or more, "
                f"got {self.before}, {self.after}"
            )

    def meets(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """-after <= query - key <= before, counted in blocks."""
        return (key >= query - self.before) & (key <= query + self.after)

    def met(self, context: Context, block: int, last: int) -> range:
        """block - before .. block + after, inside the text."""
        return range(max(0, block - self.before), min(block + self.after, last) + 1)

    @classmethod
    def examples(cls) -> tuple["BlockWindow", ...]:
        """Small instances that the contract tests run."""
        return cls(3), cls(2, 2, 0)
