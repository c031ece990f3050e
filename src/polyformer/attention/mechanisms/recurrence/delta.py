"""Linear recurrences of the delta rule: a token replaces the value of its key in a state S [D, Dv].

    delta         S_t = S_(t-1) - b_t k_t (S_(t-1)^T k_t - v_t)^T        y_t = S_t^T q_t / sqrt(D)
                  q, k = unit(q), unit(k)        b_t = sigmoid(x_t . w)        output = RMSNorm(y)
    gated_delta   S_t = a_t S_(t-1) - b_t k_t (a_t S_(t-1)^T k_t - v_t)^T        y_t = S_t^T q_t / sqrt(D)
                  log a_t = -exp(A) softplus(x_t . w_a + c)        b_t = sigmoid(x_t . w_b)
                  q, k = unit(q), unit(k)        output = RMSNorm(y) silu(z)
    kda           S_t = diag(a_t) S_(t-1) - b_t k_t ((diag(a_t) S_(t-1))^T k_t - v_t)^T
                  log a_t = -exp(A) softplus(x_t W_1 W_2 + c)        b_t = sigmoid(x_t . w_b)
                  y_t = S_t^T q_t / sqrt(D)
                  q, k = unit(q), unit(k)        output = RMSNorm(y) sigmoid(x_t U_1 U_2 + d)

x is the input of the layer, z its output gate, and unit(x) = x / sqrt(|x|^2 + 1e-6). Each member supplies the
inputs of one `scan`.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.mechanisms.recurrence.base import (
    Recurrence,
    RecurrenceConfig,
    inverse_softplus,
    unit,
)
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrenceConfig):
    """DeltaNet: the value of a key is replaced instead of added to.

    With b_t = 1 the state returns exactly v_t for k_t. q, k and v pass a short convolution first. b_t up to 2
    (`reflect`) lets the state turn a direction around, which tracking a parity needs (Grazzi et al. 2025).
    The rule is of Schlag et al. 2021, section 4.2.

    `reflect`: b from 0 to 2 instead of 0 to 1.
    """

    short_convolution: PositiveInt | None = 4
    reflect: bool = False

    kind: ClassVar[str] = "delta"
    paper: ClassVar[str] = "Yang et al. 2024 (DeltaNet), section 3"
    gates: ClassVar[tuple[str, ...]] = ("erase",)

    def build(self, num_heads: int, head_size: int) -> "Delta":
        """Return the module with short convolutions and an output norm."""
        return Delta(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["DeltaConfig", ...]:
        """Return the default, and a config with reflections and without convolutions."""
        return cls(), cls(reflect=True, short_convolution=None)


class Delta(Recurrence):
    """The scan of unit keys, with the gate b."""

    config: DeltaConfig

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return unit queries and keys, and b."""
        erase = self.per_head(gates["erase"]).sigmoid() * (2 if self.config.reflect else 1)
        q, k = (unit(x) for x in (q, k))
        return ScanInputs(q * self.key_size**-0.5, k, v, erase=erase)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(RecurrenceConfig):
    """Gated DeltaNet: a decay per token and head, and the delta rule.

    A and c are learned per head. q, k and v pass a short convolution first. The decay clears the state at
    once, the delta rule changes one value (equation 10). Qwen3-Next has layers of this kind, with fewer heads
    of queries and keys (`heads`).
    """

    short_convolution: PositiveInt | None = 4

    kind: ClassVar[str] = "gated_delta"
    paper: ClassVar[str] = "Yang et al. 2025 (Gated DeltaNet), section 3"
    gates: ClassVar[tuple[str, ...]] = ("erase", "decay")
    output_gate: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "GatedDelta":
        """Return the module with A, c, short convolutions and an output norm."""
        return GatedDelta(self, num_heads, head_size)


class GatedDelta(Recurrence):
    """The scan of unit keys, with the gate b and the decay log a."""

    config: GatedDeltaConfig

    def __init__(self, config: GatedDeltaConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        self.log_rate = nn.Parameter(torch.empty(self.num_heads).uniform_(1, 16).log())
        self.bias = nn.Parameter(inverse_softplus(torch.empty(self.num_heads).uniform_(-6.9, -2.3).exp()))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return unit queries and keys, and both gates."""
        erase = self.per_head(gates["erase"]).sigmoid()
        rate, bias = (x.to(q.dtype).view(-1, 1, 1) for x in (self.log_rate, self.bias))
        decay = -rate.exp() * F.softplus(self.per_head(gates["decay"]) + bias)
        q, k = (unit(x) for x in (q, k))
        return ScanInputs(q * self.key_size**-0.5, k, v, decay, erase)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDAConfig(RecurrenceConfig):
    """Kimi delta attention: the gated delta rule with a decay for every channel of a key.

    A is learned per head, c per channel. The decays and the gate of the output are projected from the input
    through `rank` numbers; None for the width of a value. q, k and v pass a short convolution first.
    """

    short_convolution: PositiveInt | None = 4
    rank: PositiveInt | None = None

    kind: ClassVar[str] = "kda"
    paper: ClassVar[str] = "Kimi Team 2025 (Kimi Linear), section 3"
    gates: ClassVar[tuple[str, ...]] = ("erase",)

    def gate_sizes(self, num_heads: int, head_size: int) -> dict[str, int]:
        """Return the ranks, which all heads share, and b."""
        width = head_size if self.heads is None else self.heads.value_size
        rank = self.rank or width
        return {"low_rank": rank, "output_low_rank": rank, **super().gate_sizes(num_heads, head_size)}

    def build(self, num_heads: int, head_size: int) -> "KimiDelta":
        """Return the module with A, c, W_2, U_2, d, short convolutions and an output norm."""
        return KimiDelta(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["KDAConfig", ...]:
        """Return the default, and a config of low rank without convolutions."""
        return cls(), cls(rank=3, short_convolution=None)


class KimiDelta(Recurrence):
    """The scan of unit keys, with the gate b and the decays log a of every channel."""

    config: KDAConfig

    def __init__(self, config: KDAConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        heads, rank = self.num_heads, config.rank or self.head_size
        self.decay = nn.Linear(rank, heads * self.key_size, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        steps = torch.empty(heads, self.key_size).uniform_(-6.9, -2.3).exp()
        self.bias = nn.Parameter(inverse_softplus(steps))
        self.output_gate = nn.Linear(rank, heads * self.head_size)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return unit queries and keys, and both gates."""
        erase = self.per_head(gates["erase"]).sigmoid()
        logit = self.per_head(F.linear(gates["low_rank"], self.decay.weight.to(q.dtype)))
        rate, bias = self.log_rate.to(q.dtype).view(-1, 1, 1), self.bias.to(q.dtype).unsqueeze(1)
        q, k = (unit(x) for x in (q, k))
        return ScanInputs(q * self.key_size**-0.5, k, v, -rate.exp() * F.softplus(logit + bias), erase)

    def gated(self, y: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return y sigmoid(x U_1 U_2 + d), or y without an output gate."""
        if "output_low_rank" not in gates:
            return y
        weight, bias = (x.to(y.dtype) for x in (self.output_gate.weight, self.output_gate.bias))
        return y * self.per_head(F.linear(gates["output_low_rank"], weight, bias)).sigmoid()
