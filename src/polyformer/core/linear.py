"""The linear layer, with a quicker path for the skinny products of decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SKINNY_ROWS = 32
"""Up to so many rows a product is bound by reading its weights, and oneDNN reads them faster than BLAS."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]."""
    if skinny(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's own linear can take this product and is worth it."""
    return (
        not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() <= SKINNY_ROWS * x.shape[-1]
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )


class Linear(nn.Linear):
    """`torch.nn.Linear` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
