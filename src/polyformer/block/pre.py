"""Pre-norm: x = x + f(norm(x)). Trains without warm-up. Xiong et al. 2020, section 3."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.block.base import Block, BlockConfig, SubLayer
from polyformer.ops.norms import NormConfig, normalize

LARGEST = torch.finfo(torch.float16).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNormConfig(BlockConfig):
    """x + dropout(f(norm(x))), for every sub-layer f.

    `finite`: in float16 what overflows stays at the largest number, so that the next norm makes no NaN of it.
    T5 trained in bfloat16, and its feed-forwards write more than float16 holds. `first_norm`: whether the
    first sub-layer of the first layer has a norm; ModernBERT's reads embeddings that are normed already.
    """

    finite: bool = False
    first_norm: bool = True

    kind: ClassVar[str] = "pre"
    paper: ClassVar[str] = "Xiong et al. 2020, section 3"

    @classmethod
    def examples(cls) -> tuple["PreNormConfig", ...]:
        """Each option once."""
        return cls(), cls(finite=True), cls(first_norm=False)

    def at(self, layer: int) -> "PreNormConfig":
        """With the first norm in every layer but the first."""
        return self if self.first_norm or layer == 0 else dataclasses.replace(self, first_norm=True)

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PreNorm":
        """A norm for each sub-layer."""
        return PreNorm(hidden_size, sublayers, norm, dropout, self)


class PreNorm(Block):
    """The residual stream is never normalised itself; the stack adds one norm at its end."""

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: PreNormConfig):
        super().__init__(hidden_size, norms, norm, dropout)
        self.finite = config.finite
        if not config.first_norm:
            self.norms[0] = nn.Identity()

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], real: Tensor | None = None) -> Tensor:
        """x = x + dropout(f(norm(x))) for each f in turn."""
        for norm, sublayer in zip(self.norms, sublayers):
            y = self.dropout(sublayer(normalize(norm, x, real)))
            x = _finite(x + (y if y.dtype == x.dtype else _finite(y))) if self.finite else x + y
        return x

    def first_reads(self, x: Tensor) -> Tensor:
        """norm(x)."""
        return self.norms[0](x)


def _finite(x: Tensor) -> Tensor:
    """x as it is, but for what float16 has as infinite."""
    return x.clamp(-LARGEST, LARGEST) if x.dtype == torch.float16 else x
