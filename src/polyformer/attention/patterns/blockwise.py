"""Blockwise attention: each block of queries sees a single block of keys, named by a permutation.

    i sees j  if  permutation[block(i)] == block(j)        block(p) = (p + shift) // size

The identity is attention within a block; the cyclic shifts let blocks attend to other blocks. Qiu et al. 2020
(BlockBERT), section 3.1, divide a text of fixed length n into one block per entry of the permutation. Here
the block size is fixed, and the permutation repeats for a longer text, within its next run of blocks. A block
that is mapped beyond the end of the text sees no keys. Cost: size keys per query.

Shifted groups let neighbouring blocks exchange tokens: in half of the heads blocks begin half a block earlier
(Chen et al. 2024, LongLoRA, section 3.2):

    PerHead([Blockwise(2048), Blockwise(2048, shift=1024)])

Deviation from LongLoRA: the first half block of a text is a block, and does not join the last half block.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern, TabulatedPattern
from polyformer.attention.patterns.block_base import BlockPattern
from polyformer.core.errors import InputError
from polyformer.core.host_values import tensor_on
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Blockwise(TabulatedPattern, BlockPattern):
    """Blockwise attention: block i of `size` positions sees block `permutation[i]` and no other.

    `shift`: the number of positions by which blocks begin earlier, below `size`.

    Raises `InputError` for a size below 1, for another shift, and for anything but a permutation of 0, 1, ...
    """

    size: PositiveInt
    permutation: tuple[int, ...] = (0,)
    shift: NonNegativeInt = 0

    paper: ClassVar[str] = "Qiu et al. 2020 (BlockBERT), section 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "permutation", tuple(self.permutation))
        if not self.permutation or sorted(self.permutation) != list(range(len(self.permutation))):
            raise InputError(
                f"Blockwise: permutation: expected each of 0..{max(0, len(self.permutation) - 1)} once, "
                f"got {self.permutation}"
            )

        if self.shift >= self.size:
            raise InputError(f"Blockwise: shift: expected less than the size {self.size}, got {self.shift}")

    def with_tables(self, context: Context, device: torch.device) -> Pattern:
        """Return the lookup of the query block in the permutation."""
        return PermutedBlocks(self.size, tensor_on(self.permutation, device), self.shift)

    def visible_blocks(self, context: Context, block: int, last: int) -> tuple[int, ...]:
        """Return the block that the permutation names."""
        inside = block % len(self.permutation)
        return (block - inside + self.permutation[inside],)

    @staticmethod
    def heads(size: int, blocks: int, counts: Sequence[int]) -> tuple["Blockwise", ...]:
        """Return the paper's heads for `PerHead`: `counts[s]` of them with the cyclic shift by s blocks.

        `PerHead(Blockwise.heads(256, 2, (10, 2)))` is the paper's 10 : 2 for twelve heads: ten see their own
        block, two the other block. Raises `InputError` for more shifts than blocks, and for counts below 0.
        """
        if len(counts) > blocks or min(counts, default=-1) < 0:
            raise InputError(
                f"counts: expected at most {blocks} numbers of heads, one per shift, got {counts}"
            )
        # The cyclic shift by s sends block i to block i + s, modulo the number of blocks.
        shifts = [tuple((i + shift) % blocks for i in range(blocks)) for shift in range(len(counts))]
        return tuple(Blockwise(size, order) for order, count in zip(shifts, counts) for _ in range(count))

    @classmethod
    def examples(cls) -> tuple["Blockwise", ...]:
        return cls(3), cls(2, (1, 2, 0)), cls(4, shift=2)

    @classmethod
    def picture(cls) -> tuple["Blockwise", Context]:
        """Return four blocks, each attending to the next."""
        return cls(12, (1, 2, 3, 0)), Context(48, 48)


@dataclasses.dataclass(frozen=True, eq=False)
class PermutedBlocks(BlockPattern, named=False):
    """Blockwise attention with its permutation in a tensor [blocks]."""

    size: int
    permutation: Tensor
    shift: int = 0

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return whether permutation[query] == key, within one run of the permutation."""
        number = self.permutation.shape[0]
        # The first block of the query's run of the permutation, plus the target within the run.
        return query - query % number + self.permutation[query % number] == key
