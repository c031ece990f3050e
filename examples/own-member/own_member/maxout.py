"""Maxout: the maximum of several linear pieces replaces the activation function.

    y = max_p (x W_p + b_p) W_out + b_out        p = 1 .. pieces

The result is a learned, convex, piecewise linear activation. Goodfellow et al. 2013.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention import Context
from polyformer.core.errors import InputError
from polyformer.nn import Dropout, FeedForward, FeedForwardConfig, Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxoutConfig(FeedForwardConfig):
    """`pieces`: the number of linear functions; each inner unit is their maximum."""

    intermediate_size: int = 2048
    pieces: int = 2
    inner_dropout: float = 0.0

    kind: ClassVar[str] = "maxout"
    paper: ClassVar[str] = "Goodfellow et al. 2013 (Maxout)"

    def __post_init__(self) -> None:
        for name in ("intermediate_size", "pieces"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")

    def build(self, hidden_size: int) -> "Maxout":
        """Return the feed-forward of a layer."""
        return Maxout(hidden_size, self)


class Maxout(FeedForward):
    """x [..., E] -> [..., E]."""

    def __init__(self, hidden_size: int, config: MaxoutConfig):
        super().__init__()
        self.pieces = config.pieces
        self.dropout = Dropout(config.inner_dropout)
        self.up = Linear(hidden_size, config.pieces * config.intermediate_size)
        self.down = Linear(config.intermediate_size, hidden_size)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return the largest piece of every inner unit, projected back."""
        return self.down(self.dropout(self.up(x).unflatten(-1, (self.pieces, -1)).amax(-2)))
