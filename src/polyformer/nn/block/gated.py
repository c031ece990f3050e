"""Gated: a learned gate replaces each residual sum, x = g(x, ReLU(f(norm(x)))), and is near x initially.

With x the residual stream, y = ReLU(f(norm(x))), s the logistic function, * the elementwise product and b a
learned vector with the initial value `gate_bias`, the gates are

    residual       x + y
    input          s(W x) * x + y
    output         x + s(W x - b) * y
    highway        s(W x + b) * x + (1 - s(W x + b)) * y
    sigmoid_tanh   x + s(W y - b) * tanh(U y)
    gru            (1 - z) * x + z * tanh(W_g y + U_g (r * x))
                   r = s(W_r y + U_r x),  z = s(W_z y + U_z x - b)

Only the input of sub-layers is normalised (identity map reordering): if the gates are closed, the stream from
the first to the last layer is the identity. The gates are nearly closed initially, so a policy acts on the
present observation before it learns to use the past. `gru` differs from `torch.nn.GRUCell`, which has no b
and uses z for the old state instead of the new. The cost is up to 6 E^2 products per token and sub-layer.
Parisotto et al. 2019 (GTrXL), section 3.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from polyformer.core.ops.linear import Linear, linears
from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.ranges import FiniteFloat
from polyformer.nn.block.wirings import Block, BlockConfig, SubLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedBlockConfig(BlockConfig):
    """Gated residual block: a learned gate replaces the residual sum.

    g(x, dropout(ReLU(f(norm(x))))) for every sub-layer f; `gate`: residual, input, output, ...
    """

    gate: Literal["residual", "input", "output", "highway", "sigmoid_tanh", "gru"] = "gru"
    gate_bias: FiniteFloat = 2.0  # initial value of b: the larger, the closer the block is to the identity

    kind: ClassVar[str] = "gated"
    paper: ClassVar[str] = "Parisotto et al. 2019 (GTrXL), section 3"

    @classmethod
    def examples(cls) -> tuple["GatedBlockConfig", ...]:
        return cls(), cls(gate="residual")

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "GatedBlock":
        return GatedBlock(hidden_size, sublayers, norm, dropout, self)


class GatedBlock(Block):
    """The wiring of GTrXL, or of its variant TrXL-I with the gate `residual`."""

    def __init__(
        self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: GatedBlockConfig
    ):
        super().__init__(hidden_size, norms, norm, dropout)
        self.gates = nn.ModuleList(GATES[config.gate](hidden_size, config.gate_bias) for _ in range(norms))

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = g(x, dropout(ReLU(f(norm(x))))) for each f in turn."""
        # The ReLU separates two linear maps: the last map of the sub-layer and the map that reads the sum.
        for norm, gate, sublayer in zip(self.norms, self.gates, sublayers):
            x = gate(x, self.dropout(sublayer(normalize(norm, x, valid)).relu()))
        return x


class ResidualSum(nn.Module):
    """The plain residual sum x + y."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y; as in every gate, both inputs and the output are [B, T, E]."""
        return x + y


class InputGate(nn.Module):
    """A gate that scales only the stream."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.stream = Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return s(W x) * x + y."""
        return self.stream(x).sigmoid() * x + y


class OutputGate(nn.Module):
    """A gate that scales the output of the sub-layer, computed from the stream."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.stream = Linear(hidden_size, hidden_size, bias=False)
        self.closed = _gate_bias(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + s(W x - b) * y."""
        return x + (self.stream(x) - self.closed).sigmoid() * y


class HighwayGate(nn.Module):
    """A gate that interpolates between the stream and the output (Srivastava et al. 2015)."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.stream = Linear(hidden_size, hidden_size, bias=False)
        self.closed = _gate_bias(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return s(W x + b) * x + (1 - s(W x + b)) * y."""
        # This gate is for the stream: a positive b opens it, which closes the path of y.
        carry = (self.stream(x) + self.closed).sigmoid()
        return carry * x + (1 - carry) * y


class SigmoidTanhGate(nn.Module):
    """A gate that scales the output of the sub-layer, computed from the output itself."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.opens = Linear(hidden_size, hidden_size, bias=False)
        self.writes = Linear(hidden_size, hidden_size, bias=False)
        self.closed = _gate_bias(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + s(W y - b) * tanh(U y)."""
        opens, writes = linears(y, [self.opens, self.writes])
        return x + (opens - self.closed).sigmoid() * writes.tanh()


class GRUGate(nn.Module):
    """A gated recurrent unit over depth: the stream is the state, the sub-layer's output is the input."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.of_output = _matrices(3, hidden_size)  # W_r, W_z, W_g
        self.of_stream = _matrices(3, hidden_size)  # U_r, U_z, U_g
        self.closed = _gate_bias(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return (1 - z) * x + z * tanh(W_g y + U_g (r * x))."""
        # `linears` computes the products of a shared input together; U_g has another input, r * x.
        y_r, y_z, y_g = linears(y, list(self.of_output))
        x_r, x_z = linears(x, list(self.of_stream[:2]))
        # A positive b moves z toward 0, where the output is x.
        r, z = (y_r + x_r).sigmoid(), (y_z + x_z - self.closed).sigmoid()
        return (1 - z) * x + z * (y_g + self.of_stream[2](r * x)).tanh()


GATES = {
    "residual": ResidualSum,
    "input": InputGate,
    "output": OutputGate,
    "highway": HighwayGate,
    "sigmoid_tanh": SigmoidTanhGate,
    "gru": GRUGate,
}


def _gate_bias(hidden_size: int, bias: float) -> nn.Parameter:
    """Return the vector b."""
    return nn.Parameter(torch.full((hidden_size,), bias))


def _matrices(count: int, hidden_size: int) -> nn.ModuleList:
    return nn.ModuleList(Linear(hidden_size, hidden_size, bias=False) for _ in range(count))
