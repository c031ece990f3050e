"""Low-rank attention by singular values: the baseline that Linformer was made to avoid.

    P = softmax(q k^T / sqrt(D)) = U S W^T        y = U_r S_r W_r^T v, the `rank` greatest singular values

the best approximation of P by a matrix of that rank (Eckart and Young 1936). Rows and columns of padding are
zeros in P, so that they change nothing. Encoders alone: a singular vector is of all tokens at once. Wang et
al. 2020, section 3, equation 6.

Cost: T^2 scores and of the order of T^3 for the decomposition, a head: it says what a rank can keep, and is
not fast. Deviation: gradients take the space of U_r for given, as a projection U_r U_r^T of P; those through
it would be infinite where singular values meet. float16 and bfloat16 are computed in float32.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.base import Mechanism, MechanismConfig, ScoreTerms
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.dot_product.isolation import guarded
from polyformer.ops.dropout import dropout
from polyformer.ops.precision import at_least_float32
from polyformer.ops.softmax import softmax
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVDConfig(MechanismConfig):
    """`rank`: singular values that are kept; all, where there are not so many tokens."""

    rank: int = 64
    dropout: float = 0.0  # of attention weights, after the decomposition

    kind: ClassVar[str] = "svd"
    paper: ClassVar[str] = "Wang et al. 2020, section 3, equation 6"
    causal: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    caches: ClassVar[bool] = False
    relates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"rank: counts singular values, expected 1 or more, got {self.rank}")

    def build(self, num_heads: int, head_size: int) -> "SVDAttention":
        """Without parameters."""
        return SVDAttention(self)

    def definition(self) -> "SVDConfig":
        """There is no faster form."""
        return self

    def cross(self) -> "SVDConfig":
        """The equation asks nothing of slots: any weights have a decomposition."""
        return self

    @classmethod
    def examples(cls) -> tuple["SVDConfig", ...]:
        """Fewer singular values than tokens."""
        return (cls(rank=3),)


class SVDAttention(Mechanism):
    """Softmax attention whose weights are cut down to a rank."""

    def __init__(self, config: SVDConfig):
        super().__init__()
        self.config = config

    @guarded
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: ScoreTerms | None,
    ) -> tuple[Tensor, State | None]:
        """U_r S_r W_r^T v, of P with zeros for padding."""
        dtype, groups = q.dtype, q.shape[1] // k.shape[1]
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores, allowed = q @ k.mT * q.shape[3] ** -0.5, None
        if context.kv_valid is not None:
            real = context.kv_valid[:, context.offset : context.offset + context.q_len]
            allowed = (real.unsqueeze(2) & context.kv_valid.unsqueeze(1)).unsqueeze(1)  # [B, 1, Tq, Tk]
        weights = cut(softmax(scores, allowed)[0], self.config.rank)
        weights = dropout(weights, self.config.dropout, self.training)
        return (weights @ v).to(dtype), state


def cut(weights: Tensor, rank: int) -> Tensor:
    """The nearest matrix of `rank` to weights [..., Tq, Tk]: U_r U_r^T P = U_r S_r W_r^T."""
    if rank >= min(weights.shape[-2:]):
        return weights
    left = torch.linalg.svd(weights.detach(), full_matrices=False).U[..., :rank]
    return left @ (left.mT @ weights)
