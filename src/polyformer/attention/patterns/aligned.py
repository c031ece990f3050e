"""A window of the source around the position that is aligned with the query."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.source_base import RatioPattern, last_position
from polyformer.core.ranges import NonNegativeInt, PositiveFloat
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Aligned(RatioPattern):
    """Aligned window: a token of the target sees the source around the position aligned with it.

    Target position i is aligned with source position a(i) = round(ratio * i), at most the last of its source,
    and sees `left` positions before and `right` after it. `ratio` is the number of source tokens per target
    token, such as 2 for two frames of speech per token. For the attention of a decoder to its source.

    Raises `InputError` for a ratio of 0 or below and for negative widths.
    """

    ratio: PositiveFloat
    left: NonNegativeInt
    right: NonNegativeInt

    paper: ClassVar[str] = "Luong et al. 2015, section 3.2 (local-m)"

    def spans(self, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a(i) - left and a(i) + right."""
        center = torch.minimum(self.scaled(context, device, halves=1), last_position(context, device))
        return center - self.left, center + self.right

    @classmethod
    def examples(cls) -> tuple["Aligned", ...]:
        return cls(1.0, 2, 1), cls(0.5, 0, 3), cls(1.7, 4, 0)

    @classmethod
    def picture(cls) -> tuple["Aligned", Context]:
        """Return a target of 24 tokens and its source of 48."""
        return cls(2.0, 4, 4), Context(24, 48, q_start=0)
