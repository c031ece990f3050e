"""The gated feed-forward: W_out (act(W_gate x) * W_in x); GLU, GEGLU or SwiGLU by its activation.

    with a clamp L and an offset o:    W_out (act(min(W_gate x, L)) * (clamp(W_in x, -L, L) + o))

The cost is 3 E F products per token. Shazeer 2020, equations 5 and 6; OpenAI 2025 (gpt-oss), section 2.2.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.core.ops.activations import ActivationName, activation
from polyformer.core.ops.dropout import Dropout
from polyformer.core.ops.linear import Linear, WideLinear, activated
from polyformer.core.ranges import FiniteFloat, PositiveFloat
from polyformer.core.sequence.context import Context
from polyformer.nn.feedforward.base import FeedForward, SizedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedConfig(SizedConfig):
    """Gated feed-forward: an activated projection multiplies a linear projection, as in GLU and SwiGLU.

    `activation`: "sigmoid" for GLU, "gelu" for GEGLU, "silu" for SwiGLU. The clamped SwiGLU of gpt-oss has
    "quick_gelu", `clamp` 7, `up_offset` 1 and biases.
    """

    activation: ActivationName = "silu"
    bias: bool = False
    clamp: PositiveFloat | None = None  # of the linear projection, and above only of the activated one
    up_offset: FiniteFloat = 0.0  # added to the linear projection

    kind: ClassVar[str] = "gated"
    paper: ClassVar[str] = "Shazeer 2020, equations 5 and 6"

    def build(self, hidden_size: int) -> "Gated":
        return Gated(hidden_size, self)


class Gated(FeedForward):
    """A module that maps x [..., E] to [..., E] with a gate on the inner layer."""

    def __init__(self, hidden_size: int, config: GatedConfig):
        super().__init__()
        self.activation, self.clamp, self.up_offset = config.activation, config.clamp, config.up_offset
        self.dropout = Dropout(config.inner_dropout)
        self.gate = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.up = Linear(hidden_size, config.intermediate_size, bias=config.bias)
        self.down = Linear(config.intermediate_size, hidden_size, bias=config.bias)

    def widen(self) -> None:
        """Return float32 for x in float16."""
        self.down.__class__ = WideLinear

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return (act(x W_gate) * x W_in) W_out, with projections within the clamp."""
        if self.clamp is None:
            gate, up = activated(x, self.gate, self.activation), self.up(x)
        else:
            gate = activation(self.activation)(self.gate(x).clamp(max=self.clamp))
            up = self.up(x).clamp(-self.clamp, self.clamp)
        return self.down(self.dropout(gate * (up + self.up_offset if self.up_offset else up)))
