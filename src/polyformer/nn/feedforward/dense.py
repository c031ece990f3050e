"""The position-wise feed-forward: W_out act(W_in x).

The cost is 2 E F products per token, F the intermediate size. Vaswani et al. 2017, section 3.3.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.ops.dropout import Dropout
from polyformer.core.ops.linear import Linear, WideLinear, activated
from polyformer.core.sequence.context import Context
from polyformer.nn.feedforward.base import FeedForward, SizedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(SizedConfig):
    """Dense feed-forward: two linear layers with an activation between them.

    The output is act(x W_in + b_in) W_out + b_out.
    """

    kind: ClassVar[str] = "dense"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.3"

    def build(self, hidden_size: int) -> "Dense":
        return Dense(hidden_size, self)


class Dense(FeedForward):
    """Two linear layers around an activation: x [..., E] -> [..., E]."""

    def __init__(self, hidden_size: int, config: DenseConfig):
        super().__init__()
        self.activation = config.activation
        self.dropout = Dropout(config.inner_dropout)
        self.up = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.down = Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def widen(self) -> None:
        """Return float32 for x in float16."""
        self.down.__class__ = WideLinear

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return act(x W_in + b_in) W_out + b_out."""
        inner = activated(x, self.up, self.activation)
        return self.down(self.dropout(inner) if self.training else inner)
