"""Pre-norm: x = x + f(norm(x)). Trains without warm-up. Xiong et al. 2020, section 3."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.ranges import PositiveFloat
from polyformer.nn.block.base import Block, BlockConfig, SubLayer

FLOAT16_MAX = torch.finfo(torch.float16).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNormConfig(BlockConfig):
    """Pre-norm block: each sub-layer reads a normalised input and is added to the residual stream.

    The output is x + dropout(f(norm(x))) for every sub-layer f.

    `finite`: for T5, which was trained in bfloat16: its feed-forward outputs exceed the range of float16. A
    model in float16 then keeps them and the residual stream in float32. Not with adaptive depth, a memory,
    quantized weights or other feed-forwards than 'dense' and 'gated': larger values then become the largest
    number of float16. `first_norm`: whether the first sub-layer of the first layer has a norm; ModernBERT
    normalises the embeddings instead. `residual_scale`: a factor of what sub-layers add, as in Granite.
    """

    finite: bool = False
    first_norm: bool = True
    residual_scale: PositiveFloat = 1.0

    kind: ClassVar[str] = "pre"
    paper: ClassVar[str] = "Xiong et al. 2020, section 3"

    @classmethod
    def examples(cls) -> tuple["PreNormConfig", ...]:
        return cls(), cls(finite=True), cls(first_norm=False), cls(residual_scale=0.5)

    @property
    def exceeds_float16(self) -> bool:
        """Return `finite`."""
        return self.finite

    def for_layer(self, layer: int) -> "PreNormConfig":
        """Return the configuration of layer `layer`: only the first layer may lack its first norm."""
        return self if self.first_norm or layer == 0 else dataclasses.replace(self, first_norm=True)

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PreNorm":
        return PreNorm(hidden_size, sublayers, norm, dropout, self)


class PreNorm(Block):
    """A wiring that never normalises the residual stream itself; the stack adds a norm at its end."""

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: PreNormConfig):
        super().__init__(hidden_size, norms, norm, dropout)
        self.finite, self.residual_scale = config.finite, config.residual_scale
        if not config.first_norm:
            self.norms[0] = nn.Identity()  # not removed: the other norms keep their indices

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = x + dropout(f(norm(x))) for each f in turn."""
        # x itself is never normalized, so gradients reach every layer through the identity path.
        add = finite_sum if self.finite else torch.add
        for norm, sublayer in zip(self.norms, sublayers):
            y = sublayer(norm(x) if valid is None else normalize(norm, x, valid))
            y = y if self.residual_scale == 1.0 else y * self.residual_scale
            x = add(x, self.dropout(y) if self.training else y)
        return x


def finite_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the type of x, with values beyond the range of float16 clamped where it is float16."""
    if y.dtype == torch.float16 != x.dtype:  # an infinite y would make a sum in float32 infinite
        return x + y.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    z = x + y
    return z.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(x.dtype) if x.dtype == torch.float16 else z
