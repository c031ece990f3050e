"""Global tokens: the first tokens see everything and are seen by everything."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns.block_needs import BlockNeeds
from polyformer.attention.patterns.global_base import GlobalPattern, Side, first_positions
from polyformer.attention.patterns.layout import Keys
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach


@dataclasses.dataclass(frozen=True)
class Global(GlobalPattern):
    """Global tokens: the first `tokens` of each document see all keys and are seen by all queries.

    Tokens are counted in positions, so left padding and packed documents do not change them.
    """

    tokens: PositiveInt = 1

    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    def is_global(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """Return whether position < tokens."""
        position = context.query_position if side == "q" else context.key_position
        return position(b, index) < self.tokens

    def block_needs(self) -> BlockNeeds:
        """Return the first tokens."""
        return BlockNeeds(first=self.tokens)

    def reach(self) -> Reach:
        """Return the first `tokens` positions: no later token is global."""
        return Reach(0, first=self.tokens)

    def static_slots(self, context: Context, side: Side) -> Keys | None:
        """Return the first slots if positions are slots, else None."""
        return first_positions(context, side, self.tokens)
