"""Fixed attention: the query's block, and the last columns of every block as its summary.

    i sees j  if  j // stride == i // stride   or   j % stride >= stride - columns

i and j are positions in the document. Child et al. 2019 (Sparse Transformer), section 4.2 and figure 3c. The
separate parts are `BlockWindow(stride, 0, 0)` and `Summary(stride, columns)`; the three integrations of
section 4.3, for a decoder:

    PerLayer([BlockWindow(128, 0, 0), Summary(128, 8)])     layers alternate
    Fixed(128, 8)                                           merged: every head sees both parts
    PerHead([BlockWindow(128, 0, 0), Summary(128, 8)])      heads differ

Cost: stride + columns * n / stride keys per query; the paper uses a stride of 128 and 8, 16 or 32 columns.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.block_base import (
    block_slots,
    periodic_slots,
    positions_are_traced,
)
from polyformer.attention.patterns.layout import Keys, unite
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Summary(Pattern):
    """Summary columns: every query sees the last `columns` positions of every block of `stride`.

    Raises `InputError` for a stride or columns below 1 and for more columns than a block has.
    """

    stride: PositiveInt
    columns: PositiveInt = 1

    paper: ClassVar[str] = "Child et al. 2019 (Sparse Transformer), section 4.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns > self.stride:
            raise InputError(
                f"{type(self).__name__}: columns: expected at most the {self.stride} positions of a block, "
                f"got {self.columns}"
            )

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether j % stride >= stride - columns."""
        is_summary = context.key_position(b, kv_idx) % self.stride >= self.stride - self.columns
        # The second factor is always True; it adds the axis of the queries.
        return is_summary & (q_idx >= 0)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the last columns of every block, the same for every query."""
        if positions_are_traced(context):
            return super().keys(context, start, stop)
        return periodic_slots(context, "kv", self.stride, self.stride - self.columns)

    @classmethod
    def examples(cls) -> tuple["Summary", ...]:
        return cls(4), cls(3, 2)


@dataclasses.dataclass(frozen=True)
class Fixed(Summary):
    """Fixed pattern: a query sees its block of `stride` tokens, and the last `columns` of every block."""

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether j // stride == i // stride or j % stride >= stride - columns."""
        query, key = context.query_position(b, q_idx), context.key_position(b, kv_idx)
        own = query // self.stride == key // self.stride
        return own | super().allows(context, b, h, q_idx, kv_idx)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the queries' own blocks and the last columns of every block."""
        summaries = super().keys(context, start, stop)
        if positions_are_traced(context):
            return summaries
        blocks = block_slots(context, "q", self.stride).between(start, stop)
        own = block_slots(context, "kv", self.stride)
        some = (interval for block in blocks for interval in own.some.get(block, ()))
        # Queries of several blocks have no own block in common.
        full = (interval for block in blocks for interval in own.full.get(block, ()) if len(blocks) == 1)
        return Keys(unite((*summaries.some, *some)), unite((*summaries.full, *full)))
