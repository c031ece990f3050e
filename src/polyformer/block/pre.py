"""Pre-norm: x = x + f(norm(x)). Trains without warm-up. Xiong et al. 2020, section 3."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.block.base import Block, BlockConfig, SubLayer
from polyformer.core.norms import NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNormConfig(BlockConfig):
    """x + dropout(f(norm(x))), for every sub-layer f."""

    kind: ClassVar[str] = "pre"
    row: ClassVar[str] = "A3"
    paper: ClassVar[str] = "Xiong et al. 2020, section 3"

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PreNorm":
        return PreNorm(hidden_size, sublayers, norm, dropout)


class PreNorm(Block):
    """The residual stream is never normalised itself; the stack adds one norm at its end."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer]) -> Tensor:
        for norm, sublayer in zip(self.norms, sublayers):
            x = x + self.dropout(sublayer(norm(x)))
        return x

    def first_reads(self, x: Tensor) -> Tensor:
        return self.norms[0](x)
