"""The state space model of Mamba-2: a decay per token that also weighs what the token writes.

    S_t = exp(d_t A) S_(t-1) + d_t k_t v_t^T        y_t = S_t^T q_t + r v_t        d_t = softplus(x_t . w + c)
    output = RMSNorm(y silu(z))                     over the channels of the heads that share a key

In the paper's terms q is C, k is B, v is the input of the state space, d the step and S the state h. A < 0, c
and r are learned per head, x is the input of the layer. q, k and v pass a short convolution first. d_t may
be limited to a range. Dao and Gu 2024, section 7 and appendix. Deviation, unless `heads` sets the paper's
groups: every head has its own q and k as wide as v, and the norm over all heads has one weight per channel of
a head.
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
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import RMSNorm
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSDConfig(RecurrenceConfig):
    """Mamba-2's layer: linear attention with a step size per token."""

    short_convolution: PositiveInt | None = 4
    min_step: NonNegativeFloat = 0.0  # the limits of d
    max_step: PositiveFloat | None = None

    kind: ClassVar[str] = "ssd"
    paper: ClassVar[str] = "Dao and Gu 2024 (Mamba-2), section 7"
    gates: ClassVar[tuple[str, ...]] = ("step",)
    output_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_step is not None and self.max_step < self.min_step:
            raise InputError(f"max_step: expected at least min_step {self.min_step}, got {self.max_step}")

    def build(self, num_heads: int, head_size: int) -> "SSD":
        """Return the module with A, c, r, short convolutions and an output norm."""
        return SSD(self, num_heads, head_size)


class SSD(Recurrence):
    """The scan of d v with the decay d A."""

    config: SSDConfig

    def __init__(self, config: SSDConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        heads, self.groups = self.num_heads, 1
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.bias = nn.Parameter(inverse_softplus(torch.empty(heads).uniform_(-6.9, -2.3).exp()))
        self.residual = nn.Parameter(torch.ones(heads))
        if config.heads is not None:
            self.groups = config.heads.key_heads
            self.norm = RMSNorm(heads * self.head_size, eps=config.norm_eps)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return q, k and d v with the decay."""
        rate, bias = (x.to(q.dtype).view(-1, 1, 1) for x in (self.log_rate, self.bias))
        step = F.softplus(self.per_head(gates["step"]) + bias)
        if self.config.min_step or self.config.max_step is not None:
            step = step.clamp(self.config.min_step, self.config.max_step)
        return ScanInputs(q, k, v * step, -rate.exp() * step)

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return the norm of (y + r v) silu(z) over the heads of each group."""
        assert self.norm is not None
        y = self.gated(y + self.residual.to(y.dtype).view(-1, 1, 1) * v, gates)
        y = y.unflatten(1, (self.groups, -1))  # [B, G, H / G, T, D]
        size = y.square().mean((2, 4), keepdim=True) + self.config.norm_eps
        weight = self.norm.weight.to(y.dtype)
        return (y * size.rsqrt()).flatten(1, 2) * weight.view(-1, 1, self.head_size)
