"""Sandwich: x = x + norm(f(norm(x))), with a norm on both sides of f. Ding et al. 2021, section 2.4.

Values of the residual stream then grow with the number of layers only, which avoids overflow in half
precision. Gemma 2 and 3 have this wiring, OLMo 2 has it without the first norm.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.nn.block.base import Block, BlockConfig, SubLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandwichConfig(BlockConfig):
    """Sandwich block: a norm before and a norm after each sub-layer, inside the residual branch.

    The output is x + dropout(norm(f(norm(x)))) for every sub-layer f.

    `input_norm`: whether there is a norm before a sub-layer; OLMo 2 only has the norm after it.
    """

    input_norm: bool = True

    kind: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = "Ding et al. 2021 (CogView), section 2.4"

    @classmethod
    def examples(cls) -> tuple["SandwichConfig", ...]:
        return cls(), cls(input_norm=False)

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Sandwich":
        return Sandwich(hidden_size, sublayers, norm, dropout, self.input_norm)


class Sandwich(Block):
    """A wiring that normalises what each sub-layer adds to the residual stream."""

    def __init__(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float, input_norm: bool):
        super().__init__(hidden_size, sublayers if input_norm else 0, norm, dropout)
        self.output_norms = nn.ModuleList(norm.build(hidden_size) for _ in range(sublayers))

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = x + dropout(norm(f(norm(x)))) for each f in turn."""
        for number, sublayer in enumerate(sublayers):
            read = normalize(self.norms[number], x, valid) if len(self.norms) else x
            x = x + self.dropout(normalize(self.output_norms[number], sublayer(read), valid))
        return x

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return norm(x), or x if there is no norm before a sub-layer."""
        return super().pre_norm(x) if len(self.norms) else x
