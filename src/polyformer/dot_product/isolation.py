"""NaN and infinity stay with those who see them: what a query may not see cannot reach it.

A weight of 0 does not stop a NaN, for 0 * NaN is NaN: one bad key would spoil every query of its tile, those
before it too. Finite keys and values, that is nearly all calls, cost a look at what came out, or, where
gradients are wanted, at the keys and values; only where that is not finite is the call computed with zeros in
their place, and the queries that do see one of them get NaN.

Not looked at: what `torch.compile`, `torch.func` or another tracer sees, where no number can be read, and a
GPU, which every look would bring to a halt.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from polyformer.dot_product.backends import sdpa
from polyformer.dot_product.backends.tiled import run as tiled
from polyformer.dot_product.relative import Relative
from polyformer.dot_product.request import Request

Run = Callable[[Request], tuple[Tensor, Tensor | None]]


def is_finite(x: Tensor) -> bool:
    """Whether no number of x is NaN or infinite; rarely False for finite ones too large to be summed."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return math.isfinite(x.sum(dtype=torch.float32 if half else None).item())


def is_readable(x: Tensor) -> bool:
    """Whether the numbers of x can be looked at, and cheaply."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    traced = torch._C._get_tracing_state() is not None or is_in_torch_dispatch_mode()
    return not traced and not torch._C._are_functorch_transforms_active()


def watches(request: Request) -> bool:
    """Whether a call has something to hide, and can be looked at."""
    return request.pattern is not None and not sdpa.sees_all(request) and is_readable(request.q)


def run_isolated(request: Request, run: Run) -> tuple[Tensor, Tensor | None]:
    """What `run` gives, where no query gets anything of a NaN or an infinity that it may not see."""
    if not watches(request):
        return run(request)
    k, v = request.k, request.v
    if torch.is_grad_enabled() and (request.q.requires_grad or k.requires_grad or v.requires_grad):
        if is_finite(k) and is_finite(v):
            return run(request)
    else:
        out, lse = run(request)
        if is_finite(out):
            return out, lse
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))  # [B, Hkv, Tk]
    if not bad.any():
        return run(request)
    zeros = bad.unsqueeze(-1)
    out, lse = run(dataclasses.replace(request, k=k.masked_fill(zeros, 0.0), v=v.masked_fill(zeros, 0.0)))
    spoilt = torch.zeros_like(out[..., 0]).masked_fill(_see(request, bad), torch.nan)
    return out + spoilt.unsqueeze(-1), None if lse is None else lse + spoilt


@torch.no_grad()
def _see(request: Request, bad: Tensor) -> Tensor:
    """Which queries see one of the keys `bad` [B, Hkv, Tk]: [B, H, Tq]; scores of minus infinity hide too."""
    relative = request.relative
    if relative is not None:
        relative = None if relative.bias is None else Relative(first=relative.first, bias=relative.bias)
    told = dataclasses.replace(
        request,
        q=torch.zeros_like(request.q),
        k=torch.zeros_like(request.k),
        v=bad.unsqueeze(-1).to(request.v.dtype),
        relative=relative,
        dropout=0.0,
    )
    return tiled.run(told)[0].squeeze(-1) != 0
