"""Wait-k: the decoder reads the source while it arrives, k tokens ahead of the target."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.source_base import RatioPattern
from polyformer.core.ranges import PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class WaitK(RatioPattern):
    """Wait-k: a token of the target sees the source tokens that have arrived by then.

    Target position i, counted from 0, sees the first k + floor(ratio * i) source tokens: the decoder waits
    for k tokens, then reads `ratio` tokens for each token that it writes. With ratio 1 this is
    g(t) = min(k + t - 1, |x|) for t = i + 1. Only this attention is limited: a later source token cannot
    reach the output if the encoder is causal too (`encoder.attention="Causal()"`).

    Raises `InputError` for k below 1 and for a ratio of 0 or below.
    """

    k: PositiveInt
    ratio: PositiveFloat = 1.0

    paper: ClassVar[str] = "Ma et al. 2019 (STACL), section 3.1"

    def spans(self, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return 0 and k + floor(ratio * i) - 1."""
        last = self.scaled(context, device) + self.k - 1
        return torch.zeros_like(last), last

    @classmethod
    def examples(cls) -> tuple["WaitK", ...]:
        return cls(3), cls(1, 0.5), cls(2, 1.7)

    @classmethod
    def picture(cls) -> tuple["WaitK", Context]:
        """Return a target and its source of 48 tokens each."""
        return cls(6), Context(48, 48, q_start=0)
