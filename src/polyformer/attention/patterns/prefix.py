"""Prefix attention: the first tokens see one another, the others see their past.

A prefix language model reads a given text in both directions and writes its continuation. The pattern is for
stacks that are not causal: a decoder hides later tokens of the prefix too, and refuses it. Cost: as causal
attention, and at most tokens^2 / 2 more pairs. Raffel et al. 2020 (T5), section 3.2.1.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.global_base import FirstPositions
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Prefix(Pattern):
    """Prefix pattern: every query sees the first `tokens` positions of its document, and its past."""

    tokens: PositiveInt

    paper: ClassVar[str] = "Raffel et al. 2020 (T5), section 3.2.1"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether j <= i or position j < tokens."""
        return (context.distance(q_idx, kv_idx) >= 0) | (context.key_position(b, kv_idx) < self.tokens)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the past of the queries, and the slots of the prefix."""
        prefix = FirstPositions(self.tokens).runs(context, "kv")
        if prefix is None:
            return super().keys(context, start, stop)
        # The slots of the first and the last query of the row.
        first, last = start + context.offset, stop - 1 + context.offset
        length = context.kv_len
        return Keys(clip(0, last + 1, length), clip(0, first + 1, length)) | prefix

    def causal(self) -> bool:
        """Return False: a token of the prefix sees later tokens."""
        return False

    @classmethod
    def examples(cls) -> tuple["Prefix", ...]:
        return (cls(5),)

    @classmethod
    def picture(cls) -> tuple["Prefix", Context]:
        """Return a prefix of a third of the tokens."""
        return cls(16), Context(48, 48)
