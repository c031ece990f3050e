"""Reversible: two streams, each changed by what a sub-layer makes of the other; inputs follow from outputs.

    y1 = x1 + F(norm(x2)),  y2 = x2 + G(norm(y1))        x2 = y2 - G(norm(y1)),  x1 = y1 - F(norm(x2))

One step for each sub-layer f: (a, b) -> (b, a + dropout(f(norm(b)))); with attention and feed-forward, two
steps are the equations above, and a third, for cross-attention, goes on in the same way. Training keeps the
last outputs alone (stack/reversible.py). Gomez et al. 2017, section 3.1; Kitaev et al. 2020, section 3.

The stack begins with x1 = x2 = x and ends with the mean of both, or with `join="concat"`, as Reformer, with
both as one vector of twice the width, which the final norm and the head then read. The streams are of twice
the precision of the sub-layers, so that what is subtracted again leaves next to no error, in half precision
too.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.block.base import Block, BlockConfig, SubLayer
from polyformer.core.errors import unknown
from polyformer.ops.norms import NormConfig

JOINS = ("mean", "concat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReversibleConfig(BlockConfig):
    """y1 = x1 + dropout(F(norm(x2))), y2 = x2 + dropout(G(norm(y1)))."""

    join: str = "mean"  # what becomes of the two streams at the end: that, or "concat"

    kind: ClassVar[str] = "reversible"
    paper: ClassVar[str] = "Gomez et al. 2017, section 3.1; Kitaev et al. 2020 (Reformer), section 3"
    reversible: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.join not in JOINS:
            raise unknown("join", self.join, JOINS)

    def width(self, hidden_size: int) -> int:
        """hidden_size, or twice that where both streams are concatenated."""
        return 2 * hidden_size if self.join == "concat" else hidden_size

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Reversible":
        """A norm for each sub-layer."""
        return Reversible(hidden_size, sublayers, norm, dropout)


class Reversible(Block):
    """x [2, B, T, E], both streams, through sub-layers, each [B, T, E] -> [B, T, E]."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], real: Tensor | None = None) -> Tensor:
        """(a, b) -> (b, a + dropout(f(norm(b)))) for each f in turn."""
        a, b = x
        for index, sublayer in enumerate(sublayers):
            a, b = b, a + self.change(index, sublayer, b)
        return torch.stack([a, b])

    def change(self, index: int, sublayer: SubLayer, x: Tensor) -> Tensor:
        """What sub-layer number `index`, reading the one stream x [B, T, E], adds to the other."""
        return self.dropout(sublayer(self._normed(index, x)))

    def first_reads(self, x: Tensor) -> Tensor:
        """norm(x2), x2 the second stream."""
        return self._normed(0, x[1])

    def kept(self, x: Tensor) -> Tensor:
        """x2, the second stream."""
        return x[1]

    def first_reads_kept(self, kept: Tensor) -> Tensor:
        """norm(x2), of an x2 that was kept."""
        return self._normed(0, kept)

    def _normed(self, index: int, x: Tensor) -> Tensor:
        norm = self.norms[index]
        dtype = next((parameter.dtype for parameter in norm.parameters()), x.dtype)
        return norm(x.to(dtype))


def streams(x: Tensor) -> Tensor:
    """The stack's input x [B, T, E] as both streams, [2, B, T, E]."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if half or x.device.type == "mps":  # which has no float64
        return torch.stack([x, x]).float()
    return torch.stack([x, x]).double()


def merge_streams(x: Tensor, dtype: torch.dtype, join: str = "mean") -> Tensor:
    """Both streams [2, B, T, E] as one, [B, T, E] or, for "concat", [B, T, 2 E]."""
    return (torch.cat([x[0], x[1]], -1) if join == "concat" else x.mean(0)).to(dtype)
