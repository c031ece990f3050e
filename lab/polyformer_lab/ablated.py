"""Layers without one of their parts, to measure what the part adds; a recipe imports this module."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyformer.attention.mechanisms.recurrence.members import Retention, RetentionConfig
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.ranges import PositiveShare
from polyformer.nn.block.wirings import Block, BlockConfig, SubLayer


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
class ConstantRetentionConfig(RetentionConfig):
    """Retention with the same decay `gamma` in all heads; with 1 nothing is forgotten."""

    gamma: PositiveShare = 1.0

    kind: ClassVar[str] = "constant_retention"

    def build(self, num_heads: int, head_size: int) -> "ConstantRetention":
        """Return the module with the parameters of retention."""
        return ConstantRetention(self, num_heads, head_size)


class ConstantRetention(Retention):
    """Retention without decays by head."""

    config: ConstantRetentionConfig

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return the inputs of retention with log gamma as the decay."""
        inputs = super().inputs(q, k, v, gates)
        decay = q.new_full((*v.shape[:3], 1), math.log(self.config.gamma))
        return dataclasses.replace(inputs, decay=decay)
