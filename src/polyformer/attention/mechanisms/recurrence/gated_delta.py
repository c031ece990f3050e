"""The gated delta rule: the state decays before a token replaces the value of its key.

    S_t = a_t S_(t-1) - b_t k_t (a_t S_(t-1)^T k_t - v_t)^T        y_t = S_t^T q_t / sqrt(D)
    log a_t = -exp(A) softplus(x_t . w_a + c)        b_t = sigmoid(x_t . w_b)
    q, k = unit(q), unit(k)        output = RMSNorm(y) silu(z)        unit(x) = x / sqrt(|x|^2 + 1e-6)

A and c are learned per head, x is the input of the layer. q, k and v pass a short convolution first. The
decay clears the state at once, the delta rule changes one value. Yang et al. 2025 (Gated DeltaNet), equation
10 and section 3.4. Qwen3-Next has layers of this kind, with fewer heads of queries and keys (`heads`).
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
class GatedDeltaConfig(RecurrenceConfig):
    """Gated DeltaNet: a decay per token and head, and the delta rule."""

    short_convolution: PositiveInt | None = 4

    kind: ClassVar[str] = "gated_delta"
    paper: ClassVar[str] = "Yang et al. 2025 (Gated DeltaNet), section 3"
    gates: ClassVar[tuple[str, ...]] = ("erase", "decay")
    output_gate: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "GatedDelta":
        """Return the module with A, c, short convolutions and an output norm."""
        return GatedDelta(self, num_heads, head_size)


class GatedDelta(Recurrence):
    """The scan of b v for unit keys, with the gate b and the decay log a."""

    config: GatedDeltaConfig

    def __init__(self, config: GatedDeltaConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        self.log_rate = nn.Parameter(torch.empty(self.num_heads).uniform_(1, 16).log())
        self.bias = nn.Parameter(inverse_softplus(torch.empty(self.num_heads).uniform_(-6.9, -2.3).exp()))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return unit queries and keys, b v, and both gates."""
        erase = self.per_head(gates["erase"]).sigmoid()
        rate, bias = (x.to(q.dtype).view(-1, 1, 1) for x in (self.log_rate, self.bias))
        decay = -rate.exp() * F.softplus(self.per_head(gates["decay"]) + bias)
        q, k = (unit(x) for x in (q, k))
        return ScanInputs(q * self.key_size**-0.5, k, v * erase, decay, erase)
