"""What a position scheme may do: change the input, turn queries and keys, or bias the scores."""

import dataclasses

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.context import Context
from polyformer.core.pattern import ScoreMod


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionConfig(Config):
    """Family of position schemes: `build(hidden_size, num_layers, max_positions)` makes the module."""

    def build(self, hidden_size: int, num_layers: int, max_positions: int) -> "Position":
        raise NotImplementedError


class Position(nn.Module):
    """One scheme for a whole stack; every method is the identity unless the scheme says otherwise."""

    max_positions: int | None = None
    """How many positions there are; None when there is no end to them."""

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """The input x [B, T, E] of layer `layer`, with its positions pos [T] or [B, T] made visible."""
        return x

    def rotate(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """q [B, H, Tq, D] and the new keys k [B, Hkv, Tq, D] turned by their positions."""
        return q, k

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """What is done to the scores of q [B, H, Tq, D] and all keys k [B, Hkv, Tk, D]."""
        return None
