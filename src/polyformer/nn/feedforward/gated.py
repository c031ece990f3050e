"""The gated feed-forward: W_out (act(W_gate x) * W_in x); GLU, GEGLU or SwiGLU by its activation.

The cost is 3 E F products per token. Shazeer 2020, equations 5 and 6.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.ops.dropout import Dropout
from polyformer.core.ops.linear import Linear, activated
from polyformer.core.sequence.context import Context
from polyformer.nn.feedforward.base import FeedForward, SizedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedConfig(SizedConfig):
    """Gated feed-forward: an activated projection multiplies a linear projection, as in GLU and SwiGLU.

    `activation`: "sigmoid" for GLU, "gelu" for GEGLU, "silu" for SwiGLU.
    """

    activation: str = "silu"
    bias: bool = False

    kind: ClassVar[str] = "gated"
    paper: ClassVar[str] = "Shazeer 2020, equations 5 and 6"

    def build(self, hidden_size: int) -> "Gated":
        """Return the module with three linear layers, two E -> F and one F -> E."""
        return Gated(hidden_size, self)


class Gated(FeedForward):
    """A module that maps x [..., E] to [..., E] with a gate on the inner layer."""

    def __init__(self, hidden_size: int, config: GatedConfig):
        super().__init__()
        self.activation = config.activation
        self.dropout = Dropout(config.inner_dropout)
        self.gate = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.up = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.down = Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return (act(x W_gate) * x W_in) W_out."""
        return self.down(self.dropout(activated(x, self.gate, self.activation) * self.up(x)))
