"""Linear attention: positive features of queries and keys, summed once or carried from token to token.

    S_t = S_(t-1) + phi(k_t) v_t^T        z_t = z_(t-1) + phi(k_t)        phi(x) = elu(x) + 1
    y_t = S_t^T phi(q_t) / (z_t . phi(q_t))

z is one more column of S: a value of 1 for every key. In an encoder both sums are over all keys.
Katharopoulos et al. 2020, equations 7, 10 and 18 to 20. The paper does not scale queries and keys.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.mechanisms.recurrence.base import Recurrence, RecurrenceConfig
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(RecurrenceConfig):
    """Linear attention: elu(x) + 1 of queries and keys instead of the exponential of their product."""

    kind: ClassVar[str] = "linear"
    paper: ClassVar[str] = "Katharopoulos et al. 2020, section 3"
    output_norm: ClassVar[bool] = False

    def build(self, num_heads: int, head_size: int) -> "LinearAttention":
        """Return the module, without parameters unless there are short convolutions."""
        return LinearAttention(self, num_heads, head_size)


class LinearAttention(Recurrence):
    """The scan of [v, 1] for the keys phi(k), divided by its last channel."""

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return phi(q), phi(k) and [v, 1]."""
        return ScanInputs(F.elu(q) + 1, F.elu(k) + 1, F.pad(v, (0, 1), value=1.0))

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return numerators over denominators; zeros for a query without keys, as both are 0."""
        total = y[..., -1:]
        return y[..., :-1] / torch.where(total > 0, total, 1)

    def weights(self, scan: ScanInputs, context: Context) -> Tensor:
        """Return the share of every value in every output, [B, H, T, T]."""
        weights = super().weights(scan, context)
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total > 0, total, 1)
