"""Reversible: each sub-layer reads one of two streams and changes the other; inputs follow from outputs.

    y1 = x1 + F(norm(x2)),  y2 = x2 + G(norm(y1))        x2 = y2 - G(norm(y1)),  x1 = y1 - F(norm(x2))

Each sub-layer f is a step (a, b) -> (b, a + dropout(f(norm(b)))). With attention and feed-forward, two steps
are the equations above; cross-attention adds a third step of the same form. Training stores only the last
outputs (stack/reversible.py). Gomez et al. 2017, section 3.1; Kitaev et al. 2020, section 3.

The stack starts with x1 = x2 = x and ends with the mean of both streams. With `join="concat"`, as in
Reformer, it ends with their concatenation, and the final norm and the head read twice the width. The streams
have twice the precision of the sub-layers, so that subtracting an addend again leaves almost no error, in
half precision too.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyformer.core.ops.norms import NormConfig
from polyformer.nn.block.base import Block, BlockConfig, SubLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReversibleConfig(BlockConfig):
    """Reversible block: inputs are recomputed from outputs and need not be stored.

    The outputs are y1 = x1 + dropout(F(norm(x2))) and y2 = x2 + dropout(G(norm(y1))).
    """

    join: Literal["mean", "concat"] = "mean"  # of the two streams, at the end of the stack

    kind: ClassVar[str] = "reversible"
    paper: ClassVar[str] = "Gomez et al. 2017, section 3.1; Kitaev et al. 2020 (Reformer), section 3"
    reversible: ClassVar[bool] = True

    def width(self, hidden_size: int) -> int:
        """Return hidden_size, or twice hidden_size if the streams are concatenated."""
        return 2 * hidden_size if self.join == "concat" else hidden_size

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Reversible":
        return Reversible(hidden_size, sublayers, norm, dropout)


class Reversible(Block):
    """A wiring that passes the two streams x [2, B, T, E] through sub-layers [B, T, E] -> [B, T, E]."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply (a, b) -> (b, a + dropout(f(norm(b)))) for each f in turn."""
        # The streams swap roles after each sub-layer, so every second sub-layer changes the same stream.
        a, b = x
        for index, sublayer in enumerate(sublayers):
            a, b = b, a + self.residual_branch(index, sublayer, b)
        return torch.stack([a, b])

    def residual_branch(self, index: int, sublayer: SubLayer, x: Tensor) -> Tensor:
        """Return the output of sub-layer `index` for a stream x [B, T, E]: the addend of the other stream."""
        return self.dropout(sublayer(self._normed(index, x)))

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return norm(x2), where x2 is the second stream."""
        return self._normed(0, x[1])

    def memory_input(self, x: Tensor) -> Tensor:
        """Return x2, the second stream."""
        return x[1]

    def pre_norm_memory(self, memory: Tensor) -> Tensor:
        """Return norm(x2) of a stored x2."""
        return self._normed(0, memory)

    def _normed(self, index: int, x: Tensor) -> Tensor:
        # The streams have a higher precision than the sub-layers: cast to the type of the weights.
        norm = self.norms[index]
        dtype = next((parameter.dtype for parameter in norm.parameters()), x.dtype)
        return norm(x.to(dtype))


def split_streams(x: Tensor) -> Tensor:
    """Return the input x [B, T, E] of the stack as both streams, [2, B, T, E]."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if half or x.device.type == "mps":  # MPS has no float64
        return torch.stack([x, x]).float()
    return torch.stack([x, x]).double()


def merge_streams(x: Tensor, dtype: torch.dtype, join: str = "mean") -> Tensor:
    """Return both streams [2, B, T, E] joined to [B, T, E] or, for "concat", [B, T, 2 E]."""
    return (torch.cat([x[0], x[1]], -1) if join == "concat" else x.mean(0)).to(dtype)
