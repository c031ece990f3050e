"""Nystrom attention: softmax attention through m landmarks, which are means of segments of queries and keys.

    y = softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v        scores divided by sqrt(D)

q~, k~ [m, D] are means over m segments of nearly equal length. ^+ is the pseudo-inverse, computed by six
iterations of matrix products. Xiong et al. 2021, section 3, without the optional convolution of the values.

The cost is O(T m) per head. Nystrom attention works only in encoders, because a landmark averages tokens on
both sides. Padding belongs to no segment. With fewer tokens than landmarks, each token is its own landmark.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention import Context, Mechanism, MechanismConfig, ScoreTerms, guarded, softmax
from polyformer.core.errors import InputError
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class NystromConfig(MechanismConfig):
    """`landmarks`: m. `iterations`: iterations of the pseudo-inverse."""

    landmarks: int = 64
    iterations: int = 6

    kind: ClassVar[str] = "nystrom"
    paper: ClassVar[str] = "Xiong et al. 2021 (Nystromformer), section 3"
    causal: ClassVar[bool] = False
    supports_packing: ClassVar[bool] = False
    supports_kv_cache: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = False
    pairs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.landmarks < 1 or self.iterations < 1:
            raise InputError(
                f"landmarks, iterations: expected 1 or more, got {self.landmarks}, {self.iterations}"
            )

    def build(self, num_heads: int, head_size: int) -> "Nystrom":
        """Return the mechanism of a layer."""
        return Nystrom(self)

    def definition(self) -> "NystromConfig":
        """Return the definition; the code is the equation."""
        return self

    @classmethod
    def examples(cls) -> tuple["NystromConfig", ...]:
        """Return an example with fewer landmarks than tokens."""
        return (cls(landmarks=4),)


class Nystrom(Mechanism):
    """Self-attention of whole sequences."""

    def __init__(self, config: NystromConfig):
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
        """q [B, H, T, D], k and v [B, Hkv, T, D] -> [B, H, T, D]."""
        dtype, groups = q.dtype, q.shape[1] // k.shape[1]
        exact = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(exact), *(x.to(exact).repeat_interleave(groups, dim=1) for x in (k, v))
        q = q * q.shape[3] ** -0.5
        valid = context.kv_valid
        mask = q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool) if valid is None else valid.bool()
        means = _means(mask, self.config.landmarks, exact).unsqueeze(1)  # [B, 1, m, T]
        used = (means.sum(-1) > 0).unsqueeze(2)  # [B, 1, 1, m]
        query_landmarks, key_landmarks = means @ q, means @ k
        tokens = mask[:, None, None, :]
        left = softmax(q @ key_landmarks.mT, used & tokens.mT)[0]
        middle = softmax(query_landmarks @ key_landmarks.mT, used & used.mT)[0]
        right = softmax(query_landmarks @ k.mT, tokens & used.mT)[0]
        y = left @ (_pseudo_inverse(middle, self.config.iterations) @ (right @ v))
        return y.to(dtype), state


def _means(mask: Tensor, landmarks: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix [B, m, T] that averages the tokens of each segment; empty segments have zeros."""
    rank, count = mask.cumsum(1) - 1, mask.sum(1, keepdim=True)
    segment = rank * landmarks // count.clamp(min=landmarks)  # token r of n is in segment r m / n
    segments = (
        segment.unsqueeze(1) == torch.arange(landmarks, device=mask.device).view(1, -1, 1)
    ) & mask.unsqueeze(1)
    return segments.to(dtype) / segments.sum(2, keepdim=True).clamp(min=1)


def _pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """z <- z (13 I - a z (15 I - a z (7 I - a z))) / 4, from z = a^T / (|a|_1 |a|_inf)."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    norms = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)  # entries are 0 or more
    z = a.mT / norms.clamp(min=torch.finfo(a.dtype).tiny)[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z
