"""No feed-forward: a layer has only its attention, as in Mamba-2 (Dao and Gu 2024, section 7.1)."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.sequence.context import Context
from polyformer.nn.feedforward.base import FeedForward, FeedForwardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoFeedForwardConfig(FeedForwardConfig):
    """No feed-forward: layers have only attention, and no norm for a feed-forward."""

    kind: ClassVar[str] = "none"
    paper: ClassVar[str] = "Dao and Gu 2024 (Mamba-2), section 7.1"

    def build(self, hidden_size: int) -> "NoFeedForward":
        return NoFeedForward()


class NoFeedForward(FeedForward):
    """The module of a layer without a feed-forward, which does not call it."""

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return zeros: nothing is added to the residual stream."""
        return x.new_zeros(x.shape)
