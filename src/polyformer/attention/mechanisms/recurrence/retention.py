"""Retention: every head forgets at a constant rate.

    S_t = gamma_h S_(t-1) + k_t v_t^T        y_t = S_t^T q_t / sqrt(D)        gamma_h = 1 - 2^(-5 - h)
    output = RMSNorm(y) silu(z)

h counts heads from 0. The paper rotates q and k by their positions: set the position scheme `rope`. Sun et
al. 2023 (RetNet), equations 5 to 8. Deviations: RMSNorm per head, as in the authors' code, instead of
GroupNorm; the paper's xPos scales its rotations, which the decay makes unnecessary; of its three
normalizations of scores the norm of the output leaves only 1 / sqrt(D), which matters for its epsilon.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.mechanisms.recurrence.base import Recurrence, RecurrenceConfig
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionConfig(RecurrenceConfig):
    """Retention: linear attention without denominators, with a constant decay per head."""

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
