"""The linear layer, through oneDNN on a CPU in float32: about twice BLAS's speed where BLAS is tuned for another
maker's processor, and for the few rows of decoding, where reading the weights is all the work.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]."""
    if not onednn_takes(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        return _Linear.apply(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether this product may go to oneDNN: eager float32 on a CPU, outside autocast and function transforms."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and x.numel() > 0
    )


class _Linear(torch.autograd.Function):
    """The same product with its two gradients, each a product of the same sort."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        for_x, for_weight, for_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows = grad.flatten(0, -2)
        return (
            linear(grad, weight.T) if for_x else None,
            linear(rows.T, x.flatten(0, -2).T) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


class Linear(nn.Linear):
    """`torch.nn.Linear` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
