"""Parallel: x = x + attention(norm(x)) + feedforward(norm(x)), with a shared norm. GPT-J, 2021.

GPT-NeoX and the later Falcons have a norm for each sub-layer.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.nn.block.base import Block, BlockConfig, SubLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(BlockConfig):
    """Parallel block: all sub-layers read the same normalised input, and their outputs are summed.

    The output is x + the sum of dropout(f(norm(x))) over all sub-layers f.

    `separate_norms`: whether every sub-layer has a norm of its own, as in GPT-NeoX.
    """

    separate_norms: bool = False

    kind: ClassVar[str] = "parallel"
    paper: ClassVar[str] = "Wang and Komatsuzaki 2021 (GPT-J)"

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Parallel":
        return Parallel(hidden_size, sublayers if self.separate_norms else 1, norm, dropout)

    @classmethod
    def examples(cls) -> tuple["ParallelConfig", ...]:
        return cls(), cls(separate_norms=True)


class Parallel(Block):
    """A wiring of sub-layers in parallel."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Return x + sum_f dropout(f(norm(x)))."""
        # Normalised before the loop: the sums below must not change the input of later sub-layers.
        normed = [normalize(norm, x, valid) for norm in self.norms]
        for number, sublayer in enumerate(sublayers):
            x = x + self.dropout(sublayer(normed[number % len(normed)]))
        return x
