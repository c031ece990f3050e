"""Parallel: x = x + attention(norm(x)) + feedforward(norm(x)), one norm for all. GPT-J, 2021."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.block.base import Block, BlockConfig, SubLayer
from polyformer.ops.norms import NormConfig, normalize


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(BlockConfig):
    """x + the sum of dropout(f(norm(x))) over all sub-layers f."""

    kind: ClassVar[str] = "parallel"
    paper: ClassVar[str] = "Wang and Komatsuzaki 2021 (GPT-J)"

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Parallel":
        """One norm, for all sub-layers."""
        return Parallel(hidden_size, 1, norm, dropout)


class Parallel(Block):
    """Sub-layers side by side."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], real: Tensor | None = None) -> Tensor:
        """x + sum_f dropout(f(norm(x)))."""
        normed = normalize(self.norms[0], x, real)
        for sublayer in sublayers:
            x = x + self.dropout(sublayer(normed))
        return x

    def first_reads(self, x: Tensor) -> Tensor:
        """norm(x)."""
        return self.norms[0](x)
