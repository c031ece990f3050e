"""RWKV-7: a state with different keys to read, to erase and to write, and gates for every channel.

    S_t = diag(w_t) S_(t-1) - (a_t * c_t) (c_t^T S_(t-1)) + k_t v_t^T        y_t = S_t^T r_t
    w_t = exp(-e^(-1/2) sigmoid(d + tanh(x_t W_1) W_2))        a_t = sigmoid(b + x_t A_1 A_2)
    c_t = unit(h_t * xi)        k_t = h_t * (1 + (a_t - 1) * alpha)
    output = (LayerNorm(y_t) + (r_t . (rho * k_t)) v_t) * (sigmoid(x_t G_1) G_2)

r, h and v are the queries, keys and values of the layer; products with * are per channel. w is between 0.545
and 1, so no token clears the state. a is the share of a value that is erased, for every channel of a key.
"""

import copy
import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.mechanisms.recurrence.base import Recurrence, RecurrenceConfig, unit
from polyformer.attention.mechanisms.recurrence.fused_scan import Scan
from polyformer.attention.mechanisms.recurrence.rank_one import (
    RankOneInputs,
    rank_one_recurrence,
    rank_one_scan,
)
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.ranges import PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class RWKV7Config(RecurrenceConfig):
    """RWKV-7: the delta rule with decays and shares for every channel, and separate keys to erase and write.

    d, b, xi, alpha and rho are learned. `decay_rank`, `rate_rank` and `output_rank`: numbers through which
    w, a and the gate of the output are projected.

    The paper shifts tokens before the projections: every input is a mix x_t + mu (x_(t-1) - x_t), with its
    own mu for r, w, k, v, a and g. Here r, h and v are mixed with r, h and v of the token before, by a short
    convolution of two tokens without an activation, and the gates are not shifted. A whole layer of RWKV-7
    also mixes in the values of the first layer (here `attention.value_residual`, without the paper's gate per
    token) and has a feed-forward with its own shift.
    """

    short_convolution: PositiveInt | None = 2
    norm_eps: PositiveFloat = 64e-5
    decay_rank: PositiveInt = 64
    rate_rank: PositiveInt = 64
    output_rank: PositiveInt = 128

    kind: ClassVar[str] = "rwkv7"
    paper: ClassVar[str] = "Peng et al. 2025 (RWKV-7), section 4"
    output_norm: ClassVar[bool] = False  # it has a LayerNorm instead
    erases: ClassVar[bool] = True

    def gate_sizes(self, num_heads: int, head_size: int) -> dict[str, int]:
        """Return the ranks, which all heads share."""
        ranks = {"decay_low_rank": self.decay_rank, "rate_low_rank": self.rate_rank}
        return {**ranks, "output_low_rank": self.output_rank, **super().gate_sizes(num_heads, head_size)}

    def build(self, num_heads: int, head_size: int) -> "RWKV7":
        """Return the module with the second matrices of the gates, the learned factors and the norm."""
        return RWKV7(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["RWKV7Config", ...]:
        """Return configs of low ranks, with and without the shift of tokens."""
        return (
            cls(decay_rank=3, rate_rank=2, output_rank=5),
            cls(decay_rank=2, rate_rank=3, output_rank=4, short_convolution=None),
        )


def identity(x: Tensor) -> Tensor:
    """Return x: the shift of tokens has no activation."""
    return x


class HeadLayerNorm(nn.Module):
    """LayerNorm over the channels of each head [B, H, T, D], with weights and biases per head."""

    def __init__(self, heads: int, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, size))
        self.bias = nn.Parameter(torch.zeros(heads, size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized heads."""
        weight, bias = (y.to(x.dtype).unsqueeze(1) for y in (self.weight, self.bias))
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * weight + bias


class RWKV7(Recurrence):
    """The scan with free keys to read, erase and write."""

    config: RWKV7Config
    activation = staticmethod(identity)

    def __init__(self, config: RWKV7Config, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        keys, values = (self.num_heads, self.key_size), (self.num_heads, self.head_size)
        self.decay = nn.Linear(config.decay_rank, math.prod(keys))
        self.rate = nn.Linear(config.rate_rank, math.prod(keys))
        self.output_gate = nn.Linear(config.output_rank, math.prod(values), bias=False)
        self.erase_scale = nn.Parameter(torch.full(keys, 0.85))  # xi
        self.rate_share = nn.Parameter(torch.ones(keys))  # alpha
        self.bonus = nn.Parameter(torch.zeros(keys))  # rho
        self.head_norm = HeadLayerNorm(*values, config.norm_eps)
        with torch.no_grad():
            # At the start channels forget within about 10 to 1,000 tokens.
            self.decay.bias.copy_(torch.linspace(-6.5, -1.5, self.key_size).repeat(self.num_heads))
            self.rate.bias.zero_()
            if config.short_convolution is not None:
                shift = torch.rand(self.taps.shape[1:]) / 2
                self.taps.zero_()
                self.taps[-2:-1] = shift
                self.taps[-1] = 1 - shift if config.short_convolution > 1 else torch.ones_like(shift)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return the scan with its three keys."""
        decay = -math.exp(-0.5) * self._projected(self.decay, gates["decay_low_rank"].tanh()).sigmoid()
        rate = self._projected(self.rate, gates["rate_low_rank"]).sigmoid()
        scale, share = (x.to(q.dtype).unsqueeze(1) for x in (self.erase_scale, self.rate_share))
        k = self.for_heads(k)
        reader = unit(k * scale)
        return RankOneInputs(q, k * (1 + (rate - 1) * share), v, decay, reader=reader, eraser=rate * reader)

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor], scan: ScanInputs) -> Tensor:
        """Return the normed outputs with the bonus of the token itself, times the gate, if there is one."""
        scan = scan.by_heads()
        bonus = (scan.q * self.bonus.to(y.dtype).unsqueeze(1) * scan.k).sum(-1, keepdim=True)
        y = self.head_norm(y) + bonus * v
        if "output_low_rank" not in gates:
            return y
        return y * self._projected(self.output_gate, gates["output_low_rank"].sigmoid())

    def probe(self) -> "RWKV7":
        """Return the module without its norm, which makes 0 of equal numbers and adds a bias to 0."""
        probe = copy.copy(self)
        probe._modules = {**self._modules, "head_norm": nn.Identity()}
        return probe

    def chosen_scan(self, tokens: ScanInputs, dtype: torch.dtype) -> Scan:
        """Return the definition, or chunks in torch."""
        return rank_one_recurrence if self.config.backend == "definition" else rank_one_scan

    def explained(self) -> str:
        """Return which function computes the scan, and the reason."""
        if self.config.backend != "auto":
            return f"{self.config.backend}: asked for by the option backend"
        return "chunks in torch: the recurrence of 'rwkv7' has no other form here"

    def _projected(self, layer: nn.Linear, low_rank: Tensor) -> Tensor:
        """Return the gate of every channel [B, H, T, D] from numbers [B, T, r] that all heads share."""
        bias = None if layer.bias is None else layer.bias.to(low_rank.dtype)
        return self.per_head(F.linear(low_rank, layer.weight.to(low_rank.dtype), bias))
