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
inputs of one `scan`. `delta` and `gated_delta` may take several steps for each token (`steps`).
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import for_heads
from polyformer.attention.mechanisms.base import ProjectedHeads
from polyformer.attention.mechanisms.recurrence.base import (
    Recurrence,
    RecurrenceConfig,
    RecurrentState,
    inverse_softplus,
    unit,
)
from polyformer.attention.mechanisms.recurrence.fused_scan import Scan
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.attention.mechanisms.recurrence.steps import StepInputs, step_recurrence, step_scan
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsConfig(RecurrenceConfig):
    """Options of members that may take several steps for each token.

    `reflect`: b from 0 to 2 instead of 0 to 1. `steps`: n; every step has its own keys, values and b.
    """

    short_convolution: PositiveInt | None = 4
    reflect: bool = False
    steps: PositiveInt = 1

    gates: ClassVar[tuple[str, ...]] = ("erase",)
    erases: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps > 1:  # a token then has several values; an instance attribute overrides the class's
            object.__setattr__(self, "pairs", False)

    def gate_sizes(self, num_heads: int, head_size: int) -> dict[str, int]:
        """Return the gates, with a number b per head and step."""
        sizes = super().gate_sizes(num_heads, head_size)
        return {**sizes, "erase": sizes["erase"] * self.steps}

    def projected_heads(self, num_heads: int, kv_heads: int, head_size: int) -> ProjectedHeads:
        """Return the heads of the keys and values of all steps."""
        heads = super().projected_heads(num_heads, kv_heads, head_size)
        if self.steps == 1:
            return heads
        keys = heads.keys if heads.own else num_heads
        values = heads.values if heads.own else num_heads
        return dataclasses.replace(
            heads, keys=keys * self.steps, values=values * self.steps, steps=self.steps
        )


class Steps(Recurrence):
    """A recurrence of the delta rule with several steps for each token, next to the class of its gates.

    Keys [B, n H, T, D] and values [B, n H, T, Dv] have the heads of all steps, the first step first. Keys and
    values of fewer heads belong to all steps.
    """

    config: StepsConfig

    def for_heads(self, x: Tensor) -> Tensor:
        """Return keys or values for every head of all steps."""
        steps = self.config.steps
        if x.shape[1] == steps * self.num_heads:
            return x
        return for_heads(x, self.num_heads).repeat(1, steps, 1, 1)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return the inputs by steps."""
        return StepInputs.of(super().inputs(q, k, v, gates), self.config.steps)

    def chosen_scan(self, tokens: ScanInputs, dtype: torch.dtype) -> Scan:
        """Return the function that computes a scan, for a model in `dtype`."""
        if self.config.backend == "definition":
            return step_recurrence
        return step_scan(super().chosen_scan(tokens, dtype))

    def empty_output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Mechanism.empty_output`; the values have more heads than the output."""
        return super().empty_output(q, k, v[:, : self.num_heads])

    def _record(self, scan: ScanInputs, context: Context, past: RecurrentState, queries: int) -> None:
        """Raise `InputError`: there is no weight of a token."""
        raise InputError(
            "output_attentions: a token of several steps has a value for each of them, so that no single "
            "weight says how much of it an output has; set steps to 1"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig(StepsConfig):
    """DeltaNet: the value of a key is replaced instead of added to.

    With b_t = 1 the state returns exactly v_t for k_t. q, k and v pass a short convolution first. b_t up to 2
    (`reflect`) lets the state turn a direction around, which tracking a parity needs (Grazzi et al. 2025).
    The rule is of Schlag et al. 2021, section 4.2. With several `steps` it is DeltaProduct (Siems et al.
    2025).
    """

    kind: ClassVar[str] = "delta"
    paper: ClassVar[str] = "Yang et al. 2024 (DeltaNet), section 3"

    def build(self, num_heads: int, head_size: int) -> "Delta":
        """Return the module with short convolutions and an output norm."""
        return (Delta if self.steps == 1 else DeltaProduct)(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["DeltaConfig", ...]:
        """Return the default, and reflections without convolutions, with one step and with two."""
        return (
            cls(),
            cls(reflect=True, short_convolution=None),
            cls(reflect=True, short_convolution=None, steps=2),
        )


class Delta(Recurrence):
    """The scan of unit keys, with the gate b."""

    config: StepsConfig

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return unit queries and keys, and b."""
        erase = self.per_head(gates["erase"]).sigmoid() * (2 if self.config.reflect else 1)
        q, k = (unit(x) for x in (q, k))
        return ScanInputs(q * self.key_size**-0.5, k, v, erase=erase)


class DeltaProduct(Steps, Delta):
    """The scan of unit keys, with the gate b and several steps for each token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(StepsConfig):
    """Gated DeltaNet: a decay per token and head, and the delta rule.

    A and c are learned per head. q, k and v pass a short convolution first. The decay clears the state at
    once, the delta rule changes one value (equation 10). Qwen3-Next has layers of this kind, with fewer heads
    of queries and keys (`heads`). With several `steps` it is Gated DeltaProduct (Siems et al. 2025).
    """

    kind: ClassVar[str] = "gated_delta"
    paper: ClassVar[str] = "Yang et al. 2025 (Gated DeltaNet), section 3"
    gates: ClassVar[tuple[str, ...]] = ("erase", "decay")
    output_gate: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "GatedDelta":
        """Return the module with A, c, short convolutions and an output norm."""
        return (GatedDelta if self.steps == 1 else GatedDeltaProduct)(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["GatedDeltaConfig", ...]:
        """Return the default, and three steps of reflections."""
        return cls(), cls(reflect=True, short_convolution=3, steps=3)


class GatedDelta(Delta):
    """The scan of unit keys, with the gate b and the decay log a."""

    def __init__(self, config: GatedDeltaConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        self.log_rate = nn.Parameter(torch.empty(self.num_heads).uniform_(1, 16).log())
        self.bias = nn.Parameter(inverse_softplus(torch.empty(self.num_heads).uniform_(-6.9, -2.3).exp()))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return unit queries and keys, and both gates."""
        rate, bias = (x.to(q.dtype).view(-1, 1, 1) for x in (self.log_rate, self.bias))
        decay = -rate.exp() * F.softplus(self.per_head(gates["decay"]) + bias)
        return dataclasses.replace(super().inputs(q, k, v, gates), decay=decay)


class GatedDeltaProduct(Steps, GatedDelta):
    """The scan of unit keys, with both gates and several steps for each token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDAConfig(RecurrenceConfig):
    """Kimi delta attention: the gated delta rule with a decay for every channel of a key.

    A is learned per head, c per channel. The decays and the gate of the output are projected from the input
    through `rank` numbers; None for the width of a value. q, k and v pass a short convolution first.

    `gate_bias`: whether the gate of the output has the bias d.
    """

    short_convolution: PositiveInt | None = 4
    rank: PositiveInt | None = None
    gate_bias: bool = True

    kind: ClassVar[str] = "kda"
    paper: ClassVar[str] = "Kimi Team 2025 (Kimi Linear), section 3"
    gates: ClassVar[tuple[str, ...]] = ("erase",)
    erases: ClassVar[bool] = True

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
        return cls(), cls(rank=3, short_convolution=None, gate_bias=False)


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
        self.output_gate = nn.Linear(rank, heads * self.head_size, bias=config.gate_bias)

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
        weight, bias = self.output_gate.weight.to(y.dtype), self.output_gate.bias
        bias = None if bias is None else bias.to(y.dtype)
        return y * self.per_head(F.linear(gates["output_low_rank"], weight, bias)).sigmoid()
