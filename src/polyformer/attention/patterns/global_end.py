"""Global tokens at the end: the last tokens of each document see everything and are seen by everything.

They complete the global tokens of BigBird's ITC form, where the first and last blocks are global. The end of
a document is unknown until it is complete, so a decoder cannot use this pattern.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.block_base import last_positions, side_positions
from polyformer.attention.patterns.global_base import DocumentEndPattern, Side
from polyformer.attention.patterns.layout import Interval, clip
from polyformer.attention.patterns.structure import BlockNeeds, Structure
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context

MAX_CUTS = 64
"""The most cuts of a layout; more cuts cost more than they save."""


@dataclasses.dataclass(frozen=True)
class GlobalEnd(DocumentEndPattern):
    """Global tokens at the end: the last `tokens` of each document see all keys and are seen by all queries.

    Padding does not count. Raises `InputError` for tokens below 1, and in a causal context.
    """

    tokens: PositiveInt = 1

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2 (ITC)"
    causal_error: ClassVar[str] = (
        "a causal query cannot know where its document ends; use it in an encoder, "
        "or Global for the first tokens"
    )

    @property
    def structure(self) -> Structure:
        """The last tokens."""
        return Structure(blocks=BlockNeeds(last=self.tokens))

    def global_slots(self, context: Context, start: int, length: int) -> tuple[Interval, ...]:
        """Return the slots of the last `tokens` tokens."""
        return clip(context.kv_len - self.tokens - start, length, length)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the cuts of global tokens, unless there are more than `MAX_CUTS`."""
        cuts = super().cuts(context)
        # the document boundaries of many short documents already make the rows short
        return cuts if len(cuts) <= MAX_CUTS else ()

    def table(self, context: Context, side: Side) -> Tensor:
        """Return whether position > last position of the document - tokens."""
        ends = last_positions(context)
        positions, length, shift = side_positions(context, side)
        slots = torch.arange(length) + shift
        # Queries are some of the key slots: take the ends of their documents.
        if side == "q":
            ends = ends[:, slots.clamp(0, context.kv_len - 1)]
        return (slots if positions is None else positions) > ends - self.tokens
