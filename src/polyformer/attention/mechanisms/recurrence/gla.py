"""Gated linear attention: every channel of a key forgets at a rate that depends on the token.

    S_t = diag(a_t) S_(t-1) + k_t v_t^T        y_t = S_t^T q_t / sqrt(D)
    a_t = sigmoid(x_t W_1 W_2 + c)^(1 / tau)                                W_1 [E, r], W_2 [r, H D], tau = 16
    output = RMSNorm(y) silu(z)

x is the input of the layer. The root tau keeps decays near 1. Yang et al. 2024, equation 3 and section 4.4.
Deviations: the keys are as wide as the values (the paper halves them), and RMSNorm instead of LayerNorm, as
in the authors' code.
"""

import dataclasses
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.mechanisms.recurrence.base import Recurrence, RecurrenceConfig
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.ranges import PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLAConfig(RecurrenceConfig):
    """Gated linear attention: a decay per token and channel, from a projection of rank `rank`."""

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
