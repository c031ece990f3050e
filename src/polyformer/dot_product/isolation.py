"""NaN and infinity stay with the queries that see them: what a query may not see cannot reach it.

A weight of 0 does not stop a NaN, for 0 * NaN is NaN: one bad key would reach every query of its tile, those
before it too. So where a token is not finite a call is computed with zeros in its place, and a second time
with values of 1 at such tokens and 0 elsewhere: queries whose second output is not 0 see one, and get NaN.

`run_isolated` does so for `attend`, `guarded` for mechanisms that compute by themselves. Usual calls pay for
a sum: of what came out or, where gradients are wanted, of what goes in. Not looked at: what `torch.compile`,
`torch.func` or another tracer follows, where no number can be read, and a GPU, which would have to stop.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from polyformer.core.auxiliary_losses import collect_auxiliary_losses
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.dot_product.backends import sdpa
from polyformer.dot_product.backends.tiled import run as tiled
from polyformer.dot_product.relative import Relative
from polyformer.dot_product.request import Request
from polyformer.ops.softmax import recorded, recording
from polyformer.sequence.context import Context

M = TypeVar("M")
Mixed = tuple[Tensor, State | None]
Forward = Callable[[M, Tensor, Tensor, Tensor, Context, State | None, Any], Mixed]


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


def empty(q: Tensor, v: Tensor) -> Tensor:
    """The output [B, H, Tq, Dv] of no queries q [B, H, Tq, D], and a part of its graph."""
    return q[..., :1].expand(*q.shape[:3], v.shape[3])


def run_isolated(
    request: Request, run: Callable[[Request], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """What `run` gives, where no query gets anything of a NaN or an infinity that it may not see.

    Queries are kept apart anyway, so a bad one is let through: its output is NaN.
    """
    if request.pattern is None or sdpa.sees_all(request) or not is_readable(request.q):
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
    nan = torch.zeros_like(out[..., 0]).masked_fill(_see(request, bad), torch.nan)
    return out + nan.unsqueeze(-1), None if lse is None else lse + nan


@torch.no_grad()
def _see(request: Request, bad: Tensor) -> Tensor:
    """Which queries see one of the keys `bad` [B, Hkv, Tk]: [B, H, Tq]; scores of minus infinity hide too."""
    relative = request.relative
    if relative is not None:
        relative = None if relative.bias is None else Relative(first=relative.first, bias=relative.bias)
    probe = dataclasses.replace(
        request,
        q=torch.zeros_like(request.q),
        k=torch.zeros_like(request.k),
        v=bad.unsqueeze(-1).to(request.v.dtype),
        relative=relative,
        dropout=0.0,
    )
    return tiled.run(probe)[0].squeeze(-1) != 0


def guarded(forward: Forward[M]) -> Forward[M]:
    """`Mechanism.forward` that takes calls without a row or a token, and keeps what is not finite apart.

    Padding is zero where anything is not finite. With a state only padding is kept apart: what is not finite
    in the past is seen by what follows, and where a sequence is spread over processes nothing is kept apart.
    Heads of no width are refused with an `InputError`.
    """

    @functools.wraps(forward)
    def run(
        self: M, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: Any
    ) -> Mixed:
        if not q.shape[3]:
            raise InputError(f"q, k: expected heads of a width of 1 or more, got {tuple(q.shape)}")
        if context.share is not None:  # all processes take the same steps, whatever their numbers are
            return forward(self, q, k, v, context, state, position)
        if not q.shape[0] or not q.shape[2]:  # the state is what it was: there is nothing to remember
            return empty(q, v), state
        if not is_readable(q) or all(map(is_finite, (q, k, v))):
            return forward(self, q, k, v, context, state, position)
        q, k, v = _without_padding(q, k, v, context)
        if state is not None:
            return forward(self, q, k, v, context, state, position)
        bad_queries, bad_keys = _bad_tokens(q), _bad_tokens(k) | _bad_tokens(v)
        q, k, v = (torch.where(x.isfinite(), x, 0) for x in (q, k, v))
        y, _ = forward(self, q, k, v, context, None, position)
        probe = bad_keys.to(v.dtype).expand(v.shape)
        unrecorded = recorded() if recording() else contextlib.nullcontext()  # nobody should see this run
        with torch.no_grad(), collect_auxiliary_losses(), unrecorded:
            scores = None if position is None else _Scores(position)
            seen, _ = forward(self, q, k, probe, context, None, scores)
        sees_bad = (seen != 0).any(-1, keepdim=True)
        return y.masked_fill(bad_queries | sees_bad, torch.nan), None

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class _Scores:
    """What a position scheme does to scores, without its terms in the values: who weighs what."""

    position: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.position, name)

    def relative(self, *call: Any) -> Relative | None:
        relative = self.position.relative(*call)
        if relative is None or relative.position_values is None:
            return relative
        rest = dataclasses.replace(relative, position_values=None)
        return rest if rest.tables else None


def _bad_tokens(x: Tensor) -> Tensor:
    """Which tokens of x [B, H, T, D] have something that is not finite, [B, H, T, 1]."""
    return ~x.isfinite().all(-1, keepdim=True)


def _without_padding(q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros at the padding of the queries and of the new keys."""
    if context.kv_valid is None:
        return q, k, v
    padding = ~context.kv_valid[:, None, :, None].bool()
    queries = padding[:, :, context.offset : context.offset + q.shape[2]]
    keys = padding[:, :, -k.shape[2] :]
    return q.masked_fill(queries, 0), k.masked_fill(keys, 0), v.masked_fill(keys, 0)
