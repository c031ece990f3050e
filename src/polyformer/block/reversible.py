"""Reversible: two streams, each changed by what a sub-layer makes of the other; inputs follow from outputs.

    y1 = x1 + F(norm(x2)),  y2 = x2 + G(norm(y1))        x2 = y2 - G(norm(y1)),  x1 = y1 - F(norm(x2))

One step for each sub-layer f: (a, b) -> (b, a + dropout(f(norm(b)))); with attention and feed-forward, two
steps are the equations above, and a third, for cross-attention, goes on in the same way. Training keeps the
last outputs alone (stack/reversible.py). Gomez et al. 2017, section 3.1; Kitaev et al. 2020, section 3.

The stack begins with x1 = x2 = x and ends with the mean of both, where Reformer joins them to one vector of
twice the width. The streams are of twice the precision of the sub-layers, so that what is subtracted again
leaves next to no error, in half precision too.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.block.base import Block, BlockConfig, SubLayer
from polyformer.core.norms import NormConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReversibleConfig(BlockConfig):
    """y1 = x1 + dropout(F(norm(x2))), y2 = x2 + dropout(G(norm(y1)))."""

    kind: ClassVar[str] = "reversible"
    row: ClassVar[str] = "C2"
    paper: ClassVar[str] = "Gomez et al. 2017, section 3.1; Kitaev et al. 2020 (Reformer), section 3"
    reversible: ClassVar[bool] = True

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Reversible":
        return Reversible(hidden_size, sublayers, norm, dropout)


class Reversible(Block):
    """x [2, B, T, E], both streams, through sub-layers, each [B, T, E] -> [B, T, E]."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer]) -> Tensor:
        a, b = x
        for index, sublayer in enumerate(sublayers):
            a, b = b, a + self.change(index, sublayer, b)
        return torch.stack([a, b])

    def change(self, index: int, sublayer: SubLayer, x: Tensor) -> Tensor:
        """What sub-layer number `index`, reading the one stream x [B, T, E], adds to the other."""
        return self.dropout(sublayer(self._normed(index, x)))

    def first_reads(self, x: Tensor) -> Tensor:
        return self._normed(0, x[1])

    def _normed(self, index: int, x: Tensor) -> Tensor:
        norm = self.norms[index]
        own = next((one.dtype for one in norm.parameters()), x.dtype)
        return norm(x.to(own))


def streams(x: Tensor) -> Tensor:
    """The stack's input x [B, T, E] as both streams, [2, B, T, E]."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if half or x.device.type == "mps":  # which has no float64
        return torch.stack([x, x]).float()
    return torch.stack([x, x]).double()


def joined(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Both streams [2, B, T, E] as one."""
    return x.mean(0).to(dtype)
