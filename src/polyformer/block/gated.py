"""Gated: a learned gate in place of every residual sum, x = g(x, ReLU(f(norm(x)))), which begins near x.

With x the residual stream, y = ReLU(f(norm(x))), s the logistic function, * the elementwise product and b a
learned vector that begins at `gate_bias`, the gates are

    residual       x + y
    input          s(W x) * x + y
    output         x + s(W x - b) * y
    highway        s(W x + b) * x + (1 - s(W x + b)) * y
    sigmoid_tanh   x + s(W y - b) * tanh(U y)
    gru            (1 - z) * x + z * tanh(W_g y + U_g (r * x))
                   r = s(W_r y + U_r x),  z = s(W_z y + U_z x - b)

Only the input of sub-layers is normalised (identity map reordering): from the first layer to the last the
stream is an identity where gates are closed. As they begin nearly closed, a policy acts on what it observes
before it learns to use the past. The last is not `torch.nn.GRUCell`, which has no b and whose z keeps, not
writes.
Costs up to 6 E^2 products a token and sub-layer. Parisotto et al. 2019 (GTrXL), section 3.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.block.base import Block, BlockConfig, SubLayer
from polyformer.core.errors import InputError, unknown
from polyformer.ops.linear import Linear, linears
from polyformer.ops.norms import NormConfig, normalize


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedConfig(BlockConfig):
    """g(x, dropout(ReLU(f(norm(x))))) for every sub-layer f; `gate`: residual, input, output, ..."""

    gate: str = "gru"
    gate_bias: float = 2.0  # what b begins at: the larger, the nearer to the identity

    kind: ClassVar[str] = "gated"
    paper: ClassVar[str] = "Parisotto et al. 2019 (GTrXL), section 3"

    def __post_init__(self) -> None:
        if self.gate not in GATES:
            raise unknown("gate", self.gate, GATES)
        if not abs(self.gate_bias) < float("inf"):
            raise InputError(f"gate_bias: expected a finite number, got {self.gate_bias}")

    @classmethod
    def examples(cls) -> tuple["GatedConfig", ...]:
        """The gate with the most parameters, and the one with none."""
        return cls(), cls(gate="residual")

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Gated":
        """A norm and a gate for each sub-layer."""
        return Gated(hidden_size, sublayers, norm, dropout, self)


class Gated(Block):
    """The wiring of GTrXL; with the gate `residual` that of its TrXL-I."""

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: GatedConfig):
        super().__init__(hidden_size, norms, norm, dropout)
        self.gates = nn.ModuleList(GATES[config.gate](hidden_size, config.gate_bias) for _ in range(norms))

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], real: Tensor | None = None) -> Tensor:
        """x = g(x, dropout(ReLU(f(norm(x))))) for each f in turn."""
        for norm, gate, sublayer in zip(self.norms, self.gates, sublayers):
            x = gate(x, self.dropout(sublayer(normalize(norm, x, real)).relu()))
        return x

    def first_reads(self, x: Tensor) -> Tensor:
        """norm(x)."""
        return self.norms[0](x)


class Residual(nn.Module):
    """No gate: x + y."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both [B, T, E], and so is what comes out; as of every gate."""
        return x + y


class InputGate(nn.Module):
    """Of the stream alone."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.stream = Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """s(W x) * x + y."""
        return self.stream(x).sigmoid() * x + y


class OutputGate(nn.Module):
    """Of the sub-layer's output, by the stream."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.stream = Linear(hidden_size, hidden_size, bias=False)
        self.closed = _closed(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x + s(W x - b) * y."""
        return x + (self.stream(x) - self.closed).sigmoid() * y


class HighwayGate(nn.Module):
    """Of both, as much of the one as is not of the other (Srivastava et al. 2015)."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.stream = Linear(hidden_size, hidden_size, bias=False)
        self.closed = _closed(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """s(W x + b) * x + (1 - s(W x + b)) * y."""
        carried = (self.stream(x) + self.closed).sigmoid()
        return carried * x + (1 - carried) * y


class SigmoidTanhGate(nn.Module):
    """Of the sub-layer's output, by itself."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.opens = Linear(hidden_size, hidden_size, bias=False)
        self.writes = Linear(hidden_size, hidden_size, bias=False)
        self.closed = _closed(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x + s(W y - b) * tanh(U y)."""
        opens, writes = linears(y, [self.opens, self.writes])
        return x + (opens - self.closed).sigmoid() * writes.tanh()


class GRUGate(nn.Module):
    """A gated recurrent unit over depth: the stream is its state, the sub-layer's output its input."""

    def __init__(self, hidden_size: int, bias: float):
        super().__init__()
        self.of_output = _matrices(3, hidden_size)  # W_r, W_z, W_g
        self.of_stream = _matrices(3, hidden_size)  # U_r, U_z, U_g
        self.closed = _closed(hidden_size, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(1 - z) * x + z * tanh(W_g y + U_g (r * x))."""
        y_r, y_z, y_g = linears(y, list(self.of_output))
        x_r, x_z = linears(x, list(self.of_stream[:2]))
        r, z = (y_r + x_r).sigmoid(), (y_z + x_z - self.closed).sigmoid()
        return (1 - z) * x + z * (y_g + self.of_stream[2](r * x)).tanh()


GATES = {
    "residual": Residual,
    "input": InputGate,
    "output": OutputGate,
    "highway": HighwayGate,
    "sigmoid_tanh": SigmoidTanhGate,
    "gru": GRUGate,
}


def _closed(hidden_size: int, bias: float) -> nn.Parameter:
    """The vector b."""
    return nn.Parameter(torch.full((hidden_size,), bias))


def _matrices(count: int, hidden_size: int) -> nn.ModuleList:
    return nn.ModuleList(Linear(hidden_size, hidden_size, bias=False) for _ in range(count))
