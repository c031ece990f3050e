"""How the sub-layers of a layer are wired around the residual stream."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.ops.dropout import Dropout
from polyformer.ops.norms import NormConfig

SubLayer = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(Config):
    """Family of wirings: `build(hidden_size, sublayers, norm, dropout)` makes one of so many sub-layers.

    `normalizes_output` says that a layer's output is normalised already: the stack adds no final norm.
    `reversible`: its x is two streams, [2, B, T, E].
    """

    normalizes_output: ClassVar[bool] = False
    reversible: ClassVar[bool] = False

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Block":
        """The wiring of `sublayers` sub-layers, with as many norms as it needs."""
        raise NotImplementedError

    def at(self, layer: int) -> "BlockConfig":
        """What layer `layer` of a stack has; the same in all, unless the member says otherwise."""
        return self

    def width(self, hidden_size: int) -> int:
        """The width of what a stack of such layers puts out."""
        return hidden_size


class Block(nn.Module):
    """x [B, T, E] through sub-layers, each [B, T, E] -> [B, T, E]."""

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float):
        super().__init__()
        self.norms = nn.ModuleList(norm.build(hidden_size) for _ in range(norms))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], real: Tensor | None = None) -> Tensor:
        """The output of the layer, of the shape of x.

        real: [B, T] bool, the tokens that are not padding, for norms of all tokens (`ops.norms.normalize`);
        None where all are, or where every token is normalised by itself.
        """
        raise NotImplementedError

    def first_reads(self, x: Tensor) -> Tensor:
        """What the first sub-layer is given when the layer is given x."""
        raise NotImplementedError

    def kept(self, x: Tensor) -> Tensor:
        """What of the layer's input x a memory keeps for `first_reads_kept`: [B, T, E]."""
        return x

    def first_reads_kept(self, kept: Tensor) -> Tensor:
        """What the first sub-layer is given where `kept` is what was kept."""
        return self.first_reads(kept)
