"""Base of the blocks, which wire the sub-layers of a layer around the residual stream."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.ops.dropout import Dropout
from polyformer.core.ops.norms import NormConfig

SubLayer = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(Config):
    """Family of wirings: `build(hidden_size, sublayers, norm, dropout)` creates the module of a layer.

    `normalizes_output`: the output of a layer is already normalised, so the stack adds no final norm.
    `reversible`: the input x consists of two streams, [2, B, T, E].
    """

    option: ClassVar[str] = "model.block"
    normalizes_output: ClassVar[bool] = False
    reversible: ClassVar[bool] = False

    @property
    def exceeds_float16(self) -> bool:
        """Return whether outputs of feed-forwards, and sums of these, are too large for float16."""
        return False

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Block":
        """Return the wiring of `sublayers` sub-layers, with the norms that it needs."""
        raise NotImplementedError

    def for_layer(self, layer: int) -> "BlockConfig":
        """Return the configuration of layer `layer` of a stack; by default all layers have the same."""
        return self

    def width(self, hidden_size: int) -> int:
        """Return the width of the output of a stack of such layers."""
        return hidden_size


class Block(nn.Module):
    """A wiring that passes x [B, T, E] through sub-layers, each [B, T, E] -> [B, T, E]."""

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float):
        super().__init__()
        self.norms = nn.ModuleList(norm.build(hidden_size) for _ in range(norms))
        # One dropout module serves all sub-layers, as it has no state.
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Return the output of the layer, with the shape of x.

        valid: [B, T] bool, the tokens that are not padding, for norms over all tokens (`normalize`);
        None if there is no padding or if the norm treats each token separately.
        """
        raise NotImplementedError

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return the input of the first sub-layer for the input x of the layer: norm(x)."""
        return self.norms[0](x)

    def memory_input(self, x: Tensor) -> Tensor:
        """Return the part [B, T, E] of the layer input x that a memory stores for `pre_norm_memory`."""
        return x

    def pre_norm_memory(self, memory: Tensor) -> Tensor:
        """Return the input of the first sub-layer for a stored `memory_input`."""
        return self.pre_norm(memory)
