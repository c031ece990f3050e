"""Layers without one of their parts, to measure what the part adds; a recipe imports this module."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.sequence.context import Context
from polyformer.nn.block.base import Block, BlockConfig, SubLayer
from polyformer.nn.feedforward.base import FeedForward, FeedForwardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainBlockConfig(BlockConfig):
    """Plain block: sub-layers follow each other without residual sums."""

    kind: ClassVar[str] = "plain"

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PlainBlock":
        """Return a block with a norm for each sub-layer."""
        return PlainBlock(hidden_size, sublayers, norm, dropout)


class PlainBlock(Block):
    """The wiring of pre-norm without the residual stream."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = dropout(f(norm(x))) for each f in turn."""
        for norm, sublayer in zip(self.norms, sublayers):
            x = self.dropout(sublayer(normalize(norm, x, valid)))
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoNormConfig(NormConfig):
    """No norm: vectors are returned as they are."""

    kind: ClassVar[str] = "none"

    def build(self, width: int) -> nn.Module:
        """Return the identity."""
        return nn.Identity()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoFeedForwardConfig(FeedForwardConfig):
    """No feed-forward: zeros, which leave the residual stream as it is."""

    kind: ClassVar[str] = "none"

    def build(self, hidden_size: int) -> "NoFeedForward":
        """Return the module without parameters."""
        return NoFeedForward()


class NoFeedForward(FeedForward):
    """Zeros of the shape of the input."""

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return zeros of the shape of x [..., E]."""
        return x.new_zeros(x.shape)
