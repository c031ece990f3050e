"""The state space model of Mamba-2: a decay per token that also weighs what the token writes.

    S_t = exp(d_t A) S_(t-1) + d_t k_t v_t^T        y_t = S_t^T q_t + r v_t        d_t = softplus(x_t . w + c)
    output = RMSNorm(y silu(z))                     over the channels of all heads

In the paper's terms q is C, k is B, v is the input of the state space, d the step and S the state h. A < 0, c
and r are learned per head, x is the input of the layer. q, k and v pass a short convolution first. Dao and Gu
2024, section 7 and appendix; Deviations: every head has its own q and k (the paper's default shares them
among all heads; set num_key_value_heads for k), and v has the width of the heads.
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
)
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSDConfig(RecurrenceConfig):
    """Mamba-2's layer: linear attention with a step size per token."""

    short_convolution: PositiveInt | None = 4

    kind: ClassVar[str] = "ssd"
    paper: ClassVar[str] = "Dao and Gu 2024 (Mamba-2), section 7"
    gates: ClassVar[tuple[str, ...]] = ("step",)
    output_gate: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "SSD":
        """Return the module with A, c, r, short convolutions and an output norm."""
        return SSD(self, num_heads, head_size)


class SSD(Recurrence):
    """The scan of d v with the decay d A."""

    config: SSDConfig

    def __init__(self, config: SSDConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.bias = nn.Parameter(inverse_softplus(torch.empty(num_heads).uniform_(-6.9, -2.3).exp()))
        self.residual = nn.Parameter(torch.ones(num_heads))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return q, k and d v with the decay."""
        rate, bias = (x.to(q.dtype).view(-1, 1, 1) for x in (self.log_rate, self.bias))
        step = F.softplus(self.per_head(gates["step"]) + bias)
        return ScanInputs(q, k, v * step, -rate.exp() * step)

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return the norm of (y + r v) silu(z) over all heads."""
        assert self.norm is not None
        y = self.gated(y + self.residual.to(y.dtype).view(-1, 1, 1) * v, gates)
        size = y.square().mean((1, 3), keepdim=True) + (self.norm.eps or 0)
        return y * size.rsqrt() * self.norm.weight.to(y.dtype)
