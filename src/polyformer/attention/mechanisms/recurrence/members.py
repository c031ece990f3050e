"""Linear recurrences that only add: a state S [D, Dv] of a head instead of keys and values.

    linear        S_t = S_(t-1) + phi(k_t) v_t^T        z_t = z_(t-1) + phi(k_t)        phi(x) = elu(x) + 1
                  y_t = S_t^T phi(q_t) / (z_t . phi(q_t))
    retention     S_t = gamma_h S_(t-1) + k_t v_t^T        y_t = S_t^T q_t / sqrt(D)
                  gamma_h = 1 - 2^(-5 - h), h = 0, 1, ..        output = RMSNorm(y) silu(z)
    gla           S_t = diag(a_t) S_(t-1) + k_t v_t^T        y_t = S_t^T q_t / sqrt(D)
                  a_t = sigmoid(x_t W_1 W_2 + c)^(1 / tau)        W_1 [E, r], W_2 [r, H D], tau = 16
                  output = RMSNorm(y) silu(z)
    ssd           S_t = exp(d_t A) S_(t-1) + d_t k_t v_t^T        y_t = S_t^T q_t + r v_t
                  d_t = softplus(x_t . w + c)
                  output = RMSNorm(y silu(z))        over the channels of the heads that share a key

x is the input of the layer and z its output gate. Each member supplies the inputs of one `scan`. `delta` has
the members that also erase.
"""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.mechanisms.base import PositionTerms
from polyformer.attention.mechanisms.recurrence.base import (
    Recurrence,
    RecurrenceConfig,
    inverse_softplus,
)
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import RMSNorm
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(RecurrenceConfig):
    """Linear attention: elu(x) + 1 of queries and keys instead of the exponential of their product.

    The denominators z are one more column of S: a value of 1 for every key. In an encoder both sums are over
    all keys. The paper (equations 7, 10 and 18 to 20) does not scale queries and keys.
    """

    kind: ClassVar[str] = "linear"
    paper: ClassVar[str] = "Katharopoulos et al. 2020, section 3"
    output_norm: ClassVar[bool] = False
    extra_values: ClassVar[int] = 1

    def build(self, num_heads: int, head_size: int) -> "LinearAttention":
        """Return the module, without parameters unless there are short convolutions."""
        return LinearAttention(self, num_heads, head_size)


class LinearAttention(Recurrence):
    """The scan of [v, 1] for the keys phi(k), divided by its last channel."""

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return phi(q), phi(k) and [v, 1]."""
        return ScanInputs(F.elu(q) + 1, F.elu(k) + 1, F.pad(v, (0, 1), value=1.0))

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor], scan: ScanInputs) -> Tensor:
        """Return numerators over denominators; zeros for a query without keys, as both are 0."""
        total = y[..., -1:]
        return y[..., :-1] / torch.where(total > 0, total, 1)

    def weights(self, scan: ScanInputs, context: Context) -> Tensor:
        """Return the share of every value in every output, [B, H, T, T]."""
        weights = super().weights(scan, context)
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total > 0, total, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionConfig(RecurrenceConfig):
    """Retention: linear attention without denominators, with a constant decay per head.

    The paper rotates q and k by their positions: set the position scheme `rope`. Equations 5 to 8.
    Deviations: RMSNorm per head, as in the authors' code, instead of GroupNorm; the paper's xPos scales its
    rotations, which the decay makes unnecessary; of its three normalizations of scores the norm of the output
    leaves only 1 / sqrt(D), which matters for its epsilon.
    """

    kind: ClassVar[str] = "retention"
    paper: ClassVar[str] = "Sun et al. 2023, section 2"
    output_gate: ClassVar[bool] = True

    def build(self, num_heads: int, head_size: int) -> "Retention":
        """Return the module; its parameters are the weights of the output norm."""
        return Retention(self, num_heads, head_size)


class Retention(Recurrence):
    """The scan with the decay log gamma_h at every token."""

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return q / sqrt(D), k and v with constant decays."""
        heads = torch.arange(self.num_heads, device=q.device, dtype=q.dtype)
        decay = torch.log1p(-(2.0 ** (-5 - heads))).view(-1, 1, 1).expand(*v.shape[:3], 1)
        return ScanInputs(q * self.key_size**-0.5, k, v, decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLAConfig(RecurrenceConfig):
    """Gated linear attention: a decay per token and channel, from a projection of rank `rank`.

    The root tau keeps decays near 1. Deviations: the keys are as wide as the values (the paper halves them),
    and RMSNorm instead of LayerNorm, as in the authors' code.
    """

    rank: PositiveInt = 16
    temperature: PositiveFloat = 16.0  # tau

    kind: ClassVar[str] = "gla"
    paper: ClassVar[str] = "Yang et al. 2024 (GLA), section 4"
    output_gate: ClassVar[bool] = True

    def gate_sizes(self, num_heads: int, head_size: int) -> dict[str, int]:
        """Return the rank, which all heads share, and the output gate."""
        return {"low_rank": self.rank, **super().gate_sizes(num_heads, head_size)}

    def build(self, num_heads: int, head_size: int) -> "GatedLinearAttention":
        """Return the module with W_2 and c."""
        return GatedLinearAttention(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["GLAConfig", ...]:
        """Return a config of low rank with short convolutions."""
        return (cls(rank=3, short_convolution=3),)


class GatedLinearAttention(Recurrence):
    """The scan with a decay for every channel of a key."""

    config: GLAConfig

    def __init__(self, config: GLAConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        self.decay = nn.Linear(config.rank, self.num_heads * self.key_size)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return q / sqrt(D), k and v with the decays log a_t."""
        logit = F.linear(gates["low_rank"], self.decay.weight.to(q.dtype), self.decay.bias.to(q.dtype))
        decay = F.logsigmoid(self.per_head(logit)) / self.config.temperature
        return ScanInputs(q * self.key_size**-0.5, k, v, decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSDConfig(RecurrenceConfig):
    """Mamba-2's layer: linear attention with a step size per token.

    In the paper's terms q is C, k is B, v is the input of the state space, d the step and S the state h. A <
    0, c and r are learned per head. q, k and v pass a short convolution first. d_t may be limited to a range.

    `scales`: factors of z, v, k, q and the step as they are projected (Falcon-H1). `norm_of`: y silu(z),
    y alone before z, or none.

    Deviation, unless `heads` sets the paper's groups: every head has its own q and k as wide as v, and the
    norm over all heads has one weight per channel of a head.
    """

    short_convolution: PositiveInt | None = 4
    min_step: NonNegativeFloat = 0.0  # the limits of d
    max_step: PositiveFloat | None = None
    scales: tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    norm_of: Literal["gated", "before_gate", "none"] = "gated"

    kind: ClassVar[str] = "ssd"
    paper: ClassVar[str] = "Dao and Gu 2024 (Mamba-2), section 7"
    gates: ClassVar[tuple[str, ...]] = ("step",)
    output_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_step is not None and self.max_step < self.min_step:
            raise InputError(f"max_step: expected at least min_step {self.min_step}, got {self.max_step}")

    def build(self, num_heads: int, head_size: int) -> "SSD":
        """Return the module with A, c, r, short convolutions and an output norm, if there is one."""
        plain = self.scales is None and self.norm_of == "gated"
        return (SSD if plain else VariedSSD)(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["SSDConfig", ...]:
        """Return the default, and both variants of the norm, with factors of the projections."""
        return (
            cls(),
            cls(scales=(0.5, 2.0, 0.75, 1.5, 1.25)),
            cls(norm_of="before_gate"),
            cls(norm_of="none", short_convolution=None),
        )


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

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor], scan: ScanInputs) -> Tensor:
        """Return the norm of (y + r v) silu(z) over the heads of each group."""
        return self.normed(self.gated(self.with_residual(y, v), gates))

    def with_residual(self, y: Tensor, v: Tensor) -> Tensor:
        """Return y + r v."""
        return y + self.residual.to(y.dtype).view(-1, 1, 1) * v

    def normed(self, y: Tensor) -> Tensor:
        """Return the norm of y [B, H, T, D] over the heads of each group."""
        assert self.norm is not None
        y = y.unflatten(1, (self.groups, -1))  # [B, G, H / G, T, D]
        size = y.square().mean((2, 4), keepdim=True) + self.config.norm_eps
        weight = self.norm.weight.to(y.dtype)
        return (y * size.rsqrt()).flatten(1, 2) * weight.view(-1, 1, self.head_size)


class VariedSSD(SSD):
    """Mamba-2's layer with factors of its projections, or with another place of the norm."""

    def __init__(self, config: SSDConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        if config.norm_of == "none":
            self.norm = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: PositionTerms,
        *gates: Tensor,
    ) -> tuple[Tensor, State | None]:
        """See `Recurrence.forward`; the projections are scaled first."""
        if self.config.scales is not None:
            z, *factors, step = self.config.scales
            v, k, q = (x * factor for x, factor in zip((v, k, q), factors))
            sizes = self.config.gate_sizes(self.num_heads, self.head_size)
            own = {"step": step, "output": z}
            gates = tuple(
                torch.cat(
                    [part * own[name] for name, part in zip(sizes, gate.split([*sizes.values()], -1))], -1
                )
                for gate in gates
            )
        return super().forward(q, k, v, context, state, position, *gates)

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor], scan: ScanInputs) -> Tensor:
        """Return norm(y + r v) silu(z), (y + r v) silu(z) without a norm, or the norm of that as in `SSD`."""
        if self.config.norm_of == "gated":
            return super().output(y, v, gates, scan)
        y = self.with_residual(y, v)
        return self.gated(y if self.norm is None else self.normed(y), gates)
