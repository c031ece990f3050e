"""KERPLE: conditionally positive definite kernels of the distance as a learned bias of each head.

    log      score_ij = q_i . k_j / sqrt(D) - r_1 log(1 + r_2 |i - j|)       r_1, r_2 > 0
    power    score_ij = q_i . k_j / sqrt(D) - r_1 |i - j|^r_2                r_1 > 0, 0 < r_2 <= 2

Each head has two parameters, shared by all layers. Chi et al. 2022.
"""

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyformer.attention import Context, Relative
from polyformer.attention.positions import Position, PositionConfig, Shape, Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerpleConfig(PositionConfig):
    """`variant`: the logarithmic kernel, which extrapolates best, or a power of the distance."""

    variant: Literal["log", "power"] = "log"

    kind: ClassVar[str] = "kerple"
    paper: ClassVar[str] = "Chi et al. 2022 (KERPLE)"

    def build(self, shape: Shape) -> "Kerple":
        """Return the scheme for the heads of a stack."""
        return Kerple(shape.num_heads, self.variant)

    @classmethod
    def examples(cls) -> tuple["KerpleConfig", ...]:
        """Return both variants."""
        return cls(), cls(variant="power")


class Kerple(Position):
    """Biases [H, R] over the R distances of a call."""

    def __init__(self, num_heads: int, variant: str):
        super().__init__()
        self.variant = variant
        self.scale = nn.Parameter(torch.linspace(-1.0, 1.0, num_heads))  # r_1 = softplus(scale)
        self.shape = nn.Parameter(torch.zeros(num_heads))  # r_2 = softplus(shape), or 2 sigmoid(shape)

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """Return the kernel of every distance between a query and a key of this call."""
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device, dtype=q.dtype).abs()
        scale, shape = F.softplus(self.scale.unsqueeze(1)), self.shape.unsqueeze(1)
        if self.variant == "log":
            kernel = torch.log1p(F.softplus(shape) * distance)
        else:
            kernel = distance ** (2 * torch.sigmoid(shape))
        return Relative(first=least, bias=(-scale * kernel).to(q.dtype))
