"""Operations on quantized weights of any kind."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.ops.linear import linear
from polyformer.core.ops.tuning.machine import core_cache


def dequantized_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the definition for a dequantized weight [O, I], on any device; gradients reach x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def chunked_product(x: Tensor, outputs: int, rows: Callable[[slice], Tensor]) -> Tensor:
    """Return x [..., I] times a weight [O, I], transposed, by float products that each fit a core's cache.

    rows: returns some rows of the weight in the type of x.
    """
    y = x.new_empty(*x.shape[:-1], outputs)
    step = max(64, 4 * core_cache() // (x.element_size() * x.shape[-1]))
    for start in range(0, outputs, step):
        part = slice(start, min(start + step, outputs))
        y[..., part] = linear(x, rows(part))
    return y


def has_fast_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether faster methods than the definition apply: eager on a CPU, outside autograd, autocast."""
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and torch._C._get_tracing_state() is None
        and is_plain_call(x)
        and x.numel() > 0
        and weight.numel() > 0
    )


def is_plain_call(x: Tensor) -> bool:
    """Return whether a call with x is eager, outside autograd, autocast and torch.func."""
    return (
        not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._are_functorch_transforms_active()
    )
