"""Low-rank attention by singular values: the baseline that Linformer was made to avoid.

    P = softmax(q k^T / sqrt(D)) = U S W^T        y = U_r S_r W_r^T v, the `rank` largest singular values

the best approximation of P by a matrix of that rank (Eckart and Young 1936). Rows and columns of padding are
zeros in P, so that they have no influence. Only for encoders: a singular vector depends on all tokens. Wang
et al. 2020, section 3, equation 6.

Cost: T^2 scores and O(T^3) for the decomposition, per head: it shows how much a rank can represent, and is
not fast. Deviation: gradients treat the space of U_r as constant, with the output as a projection U_r U_r^T
of P; gradients through U_r would be infinite where singular values are equal. float16 and bfloat16 are
computed in float32.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig, PositionTerms
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.dropout import dropout
from polyformer.core.ops.softmax import softmax
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVDConfig(MechanismConfig):
    """Low-rank attention: attention probabilities are truncated to their largest singular values.

    `rank`: the number of singular values that are kept; all of them if there are fewer tokens.
    """

    rank: PositiveInt = 64
    dropout: Probability = 0.0  # of attention weights, after the decomposition

    kind: ClassVar[str] = "svd"
    paper: ClassVar[str] = "Wang et al. 2020, section 3, equation 6"
    causal: ClassVar[bool] = False
    supports_packing: ClassVar[bool] = False
    supports_kv_cache: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = False
    reads_any_sequence: ClassVar[bool] = True  # any attention weights have a decomposition

    def build(self, num_heads: int, head_size: int) -> "SVDAttention":
        return SVDAttention(self)

    @classmethod
    def examples(cls) -> tuple["SVDConfig", ...]:
        return (cls(rank=3),)


class SVDAttention(Mechanism):
    """Softmax attention with weights truncated to a lower rank."""

    def __init__(self, config: SVDConfig):
        super().__init__()
        self.config = config

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return U_r S_r W_r^T v of P, with zeros in P for padding, and the state unchanged."""
        dtype, groups = q.dtype, q.shape[1] // k.shape[1]
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores, allowed = q @ k.mT * q.shape[3] ** -0.5, None
        if context.q_valid is not None and context.kv_valid is not None:
            # Rows of padding are masked too: otherwise they would change the singular vectors.
            allowed = context.q_valid.unsqueeze(2) & context.kv_valid.unsqueeze(1)
            allowed = allowed.unsqueeze(1)  # [B, 1, Tq, Tk]
        weights = truncate_rank(softmax(scores, allowed)[0], self.config.rank)
        weights = dropout(weights, self.config.dropout, self.training)
        return (weights @ v).to(dtype), state


def truncate_rank(weights: Tensor, rank: int) -> Tensor:
    """Return the nearest matrix of rank `rank` to weights P [..., Tq, Tk]: U_r U_r^T P = U_r S_r W_r^T."""
    if rank >= min(weights.shape[-2:]):
        return weights
    # Detached, because the gradient of the singular vectors may be infinite.
    left = torch.linalg.svd(weights.detach(), full_matrices=False).U[..., :rank]
    return left @ (left.mT @ weights)
