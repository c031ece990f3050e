"""Spans of the source that the caller states for each token of the target, as from a known alignment."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.source_base import SourcePattern
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class SourceSpans(SourcePattern):
    """Stated spans: a token of the target sees the source positions that the caller states for it.

    An encoder-decoder takes them as `source_spans` [B, T, 2], the first and the last source position of each
    target position; a token with last < first sees nothing. `attend` reads `Context(q_spans=...)`; without a
    table every key is seen.
    """

    paper: ClassVar[str] = ""

    def spans(self, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the table of the caller."""
        if context.q_spans is None:
            first = torch.zeros(context.q_len, dtype=torch.long, device=device)
            return first, first + context.kv_len - 1
        first, last = context.q_spans.to(device).unbind(1)
        return first, last

    @classmethod
    def picture(cls) -> tuple["SourceSpans", Context]:
        """Return words of a source of 48 tokens for the 24 tokens of a target."""
        first = torch.tensor([0, 7, 12, 21, 30, 41]).repeat_interleave(4)
        last = torch.tensor([6, 11, 20, 29, 40, 47]).repeat_interleave(4)
        return cls(), Context(24, 48, q_start=0, q_spans=torch.stack([first, last]).unsqueeze(0))
