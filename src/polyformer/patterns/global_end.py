"""Global tokens at the end: the last few of each document see everything and are seen by everything.

The other half of the global tokens of BigBird's ITC form, whose first and last blocks are global. Where a
document ends is known only once it is all there, so no decoder has this.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.patterns.block_base import check_size, last_positions, side_of
from polyformer.patterns.global_base import GlobalPattern, Side
from polyformer.patterns.layout import Keys, clip
from polyformer.sequence.context import Context

MANY = 64
"""Cuts of a layout from which on they would cost more than they save."""


@dataclasses.dataclass(frozen=True)
class GlobalEnd(GlobalPattern):
    """The last `tokens` positions of each document see all keys and are seen by all queries.

    Padding does not count. Raises `InputError` for tokens below 1, and in a causal context.
    """

    tokens: int = 1

    paper: ClassVar[str] = "Zaheer et al. 2020 (BigBird), section 2 (ITC)"

    def __post_init__(self) -> None:
        check_size("GlobalEnd", tokens=self.tokens)

    def causal(self) -> bool:
        """No: the end of a document is not known before it is there."""
        return False

    def chosen(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """position > last position of the document - tokens."""
        table = context.once((self, side, "table"), lambda: self._table(context, side)).to(index.device)
        return table[0, index] if len(table) == 1 else table[b, index]

    def known(self, context: Context, side: Side) -> Keys | None:
        """The last slots, where the context has no documents, padding or positions."""
        self._check(context)
        if any(
            tensor is not None for tensor in (context.q_pos, context.kv_pos, context.kv_doc, context.kv_valid)
        ):
            return None
        start, length = (context.offset, context.q_len) if side == "q" else (0, context.kv_len)
        last = clip(context.kv_len - self.tokens - start, length, length)
        return Keys(last, last)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Those of global tokens, unless there are very many."""
        cuts = super().cuts(context)
        # the limits of many short documents make short rows enough
        return cuts if len(cuts) <= MANY else ()

    def _table(self, context: Context, side: Side) -> Tensor:
        """Which queries or keys are global, [B or 1, T]."""
        self._check(context)
        ends = last_positions(context)
        positions, length, shift = side_of(context, side)
        slots = torch.arange(length) + shift
        if side == "q":
            ends = ends[:, slots.clamp(0, context.kv_len - 1)]
        return (slots if positions is None else positions) > ends - self.tokens

    def _check(self, context: Context) -> None:
        if context.causal:
            raise InputError(
                "GlobalEnd: a causal query cannot know where its document ends; use it in an encoder, "
                "or Global for the first tokens"
            )
