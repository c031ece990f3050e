"""Short documents: all tokens of a document with few tokens see one another.

With a sparse pattern, `Whole(704) | BlockWindow(64) | ..`, this is the behaviour of transformers' BigBird for
short texts, where sparse blocks save nothing. Each document is judged by its number of tokens, so padding and
packing do not change the result. The length of a document is unknown until it is complete, so a decoder
cannot use this pattern. Cost: at most `tokens` keys per query, and none in long documents.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.block_base import last_positions, side_positions
from polyformer.attention.patterns.global_base import DocumentEndPattern, Side
from polyformer.attention.patterns.implied import Causal
from polyformer.attention.patterns.layout import Interval
from polyformer.attention.patterns.structure import BlockNeeds, Structure
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Whole(DocumentEndPattern):
    """Short documents whole: tokens of documents of at most `tokens` tokens see their whole document.

    Padding does not count. Raises `InputError` for tokens below 1, and in a causal context.
    """

    tokens: PositiveInt

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2"
    causal_error: ClassVar[str] = (
        "a causal query cannot know how long its document will be; use it in an encoder"
    )

    @property
    def structure(self) -> Structure:
        """The whole text if it is short."""
        return Structure(blocks=BlockNeeds(whole=self.tokens))

    def global_slots(self, context: Context, start: int, length: int) -> tuple[Interval, ...]:
        """Return all slots or none."""
        return ((0, length),) if context.kv_len <= self.tokens and length else ()

    def table(self, context: Context, side: Side) -> Tensor:
        """Return whether the document has at most `tokens` tokens."""
        # The last position of a document is its number of tokens minus 1.
        short = last_positions(context) < self.tokens
        if side == "kv":
            return short
        _, length, shift = side_positions(context, side)
        return short[:, (torch.arange(length) + shift).clamp(0, context.kv_len - 1)]

    @classmethod
    def examples(cls) -> tuple[Pattern, ...]:
        """Return small instances; the second is a union, as `Whole` allows nothing in long documents."""
        return cls(100), Causal() | cls(5)

    @classmethod
    def picture(cls) -> tuple[Pattern, Context]:
        """Return four documents, two of them short."""
        documents = torch.tensor([[0] * 9 + [1] * 21 + [2] * 12 + [3] * 6])
        return cls(12), Context(48, 48, q_doc=documents, kv_doc=documents)
