"""Post-norm: x = norm(x + f(x)). Vaswani et al. 2017, section 3.1. Requires warm-up (Xiong et al. 2020)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.nn.block.base import Block, BlockConfig, SubLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostNormConfig(BlockConfig):
    """Post-norm block: each sub-layer is followed by a residual sum and a norm.

    The output is norm(x + dropout(f(x))) for every sub-layer f.
    """

    kind: ClassVar[str] = "post"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.1"
    normalizes_output: ClassVar[bool] = True

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PostNorm":
        return PostNorm(hidden_size, sublayers, norm, dropout)


class PostNorm(Block):
    """The wiring of the original Transformer."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = norm(x + dropout(f(x))) for each f in turn."""
        # The norm of the sum leaves no identity path through the stack: hence the warm-up.
        for norm, sublayer in zip(self.norms, sublayers):
            y = sublayer(x)
            x = normalize(norm, x + (self.dropout(y) if self.training else y), valid)
        return x

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return x: the first sub-layer has no norm before it."""
        return x
