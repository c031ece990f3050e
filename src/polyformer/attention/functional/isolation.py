"""Isolation of NaN and infinity: a value that is not finite reaches only queries that may see its token.

A weight of 0 does not stop a NaN because 0 * NaN is NaN: a bad key would reach every query of its tile,
including earlier queries. If a token is not finite, the call is therefore computed with zeros at this token,
and a second time with values of 1 at such tokens and 0 elsewhere. A query with a second output other than 0
sees such a token, and its output becomes NaN.

`run_isolated` does this for `attend`, `guarded` for mechanisms with a separate implementation. Calls with
finite inputs pay only for a sum: of the outputs or, if gradients are required, of the inputs. Calls inside
`torch.compile`, `torch.func` or another tracer are not checked, because their values cannot be read.

Calls on a GPU are not checked either, because the check would wait for the device. There, keys and values of
padding are set to zero: no query may see them, so nothing has to be read. Later tokens and tokens of other
documents are not isolated on a GPU, and neither is padding in calls of fewer than `FEW` queries, such as
steps of decoding, in which a copy of all keys would take longer than the call.
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

from polyformer.attention.functional.backends import sdpa
from polyformer.attention.functional.backends.tiled import run as tiled
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Call, Request, requires_gradients
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import collect_auxiliary_losses
from polyformer.core.ops.softmax import recorded, recording
from polyformer.core.sequence.context import Context
from polyformer.core.state import State

FEW = 16
"""The least number of queries for which padding is set to zero on a GPU."""

C = TypeVar("C", Call, Request)

Mixed = tuple[Tensor, State | None]
Forward = Callable[..., Mixed]


def is_finite(x: Tensor) -> bool:
    """Return whether x has no NaN and no infinity; False too in the rare case that its sum overflows."""
    exact = x.dtype == torch.float32 or x.dtype == torch.float64
    return math.isfinite((x.sum() if exact else x.sum(dtype=torch.float32)).item())


def is_readable(x: Tensor) -> bool:
    """Return whether the values of x can be read cheaply: on the CPU, outside tracers and transforms."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    traced = torch._C._get_tracing_state() is not None or is_in_torch_dispatch_mode()
    return not traced and not torch._C._are_functorch_transforms_active()


def is_unreadable_device(x: Tensor) -> bool:
    """Return whether reading a value of x waits for a GPU."""
    return x.is_cuda


def without_padding_keys(k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Return k, v [B, Hkv, Tk, D] with zeros at padding on a GPU, unchanged elsewhere and for few queries."""
    valid = context.kv_valid
    if valid is None or not is_unreadable_device(k) or context.q_len < FEW:
        return k, v
    padding = context.once("padding keys", lambda: ~valid[:, None, :, None].bool())
    return k.masked_fill(padding, 0), v.masked_fill(padding, 0)


def empty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output [B, H, Tq, Dv] of a call without queries; the gradients of q, k, v are zeros."""
    q = for_heads(q[..., :1], v.shape[1])
    return q.expand(*q.shape[:3], v.shape[3]) + (k[..., :0].sum() + v[..., :0].sum())


def if_finite(
    run: Callable[[C], tuple[Tensor, Tensor | None]], call: C, builds_graph: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return the result of a call; None if a NaN or infinity may have to be isolated.

    If the call builds a graph the inputs are checked: even with finite outputs, a backward pass would spread
    a NaN.
    """
    if builds_graph:
        return run(call) if is_finite(call.k) and is_finite(call.v) else None
    out, lse = run(call)
    return (out, lse) if is_finite(out) else None


def run_isolated(
    request: Request, run: Callable[[Request], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Return the result of `run`, without any effect of a NaN or an infinity on queries that may not see it.

    Queries never affect each other, so a bad query is not replaced: its output is NaN. If the sequence is
    spread over processes, all processes must take the same steps, so each part of the call is isolated
    instead.
    """
    spread = request.context.shard is not None
    if spread or request.pattern is None or sdpa.sees_all(request):
        return run(request)
    if not is_readable(request.q):
        k, v = without_padding_keys(request.k, request.v, request.context)
        return run(request if k is request.k else dataclasses.replace(request, k=k, v=v))
    builds_graph = requires_gradients(request.q, request.k, request.v)
    if (result := if_finite(run, request, builds_graph)) is not None:
        return result
    k, v = request.k, request.v
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))  # [B, Hkv, Tk]
    if not bad.any():
        return run(request)
    # [B, Hkv, Tk, 1]
    zeros = bad.unsqueeze(-1)
    out, lse = run(dataclasses.replace(request, k=k.masked_fill(zeros, 0.0), v=v.masked_fill(zeros, 0.0)))
    nan = torch.zeros_like(out[..., 0]).masked_fill(_see(request, bad), torch.nan)
    return out + nan.unsqueeze(-1), None if lse is None else lse + nan


@torch.no_grad()
def _see(request: Request, bad: Tensor) -> Tensor:
    """Return which queries [B, H, Tq] see a key of `bad` [B, Hkv, Tk]; a score of minus infinity hides it."""
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


def guarded(forward: Forward) -> Forward:
    """Wrap `Mechanism.forward` so that it accepts calls without rows or tokens and isolates NaN and infinity.

    If any value is not finite, padding is set to zero. With a state only padding is isolated: later tokens
    see values of the past that are not finite. A sequence that is spread over processes is not isolated.
    Gates [B, T, C] of a mechanism are the last arguments; they belong to the keys.
    Raises `InputError` for heads of width 0.
    """

    @functools.wraps(forward)
    def run(  # noqa: PLR0917 - the arguments of `Mechanism.forward`
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: Any,
        *gates: Tensor,
    ) -> Mixed:
        if not q.shape[3]:
            raise InputError(f"q, k: expected heads of a width of 1 or more, got {tuple(q.shape)}")
        if context.shard is not None:  # all processes must take the same steps, whatever their values are
            return forward(self, q, k, v, context, state, position, *gates)
        if not q.shape[0] or not q.shape[2]:  # the state does not change: there are no new tokens
            return self.empty_output(q, k, v), state
        if is_unreadable_device(q):
            q, k, v = _without_padding(q, k, v, context)
            return forward(self, q, k, v, context, state, position, *gates)
        if not is_readable(q) or all(map(is_finite, (q, k, v, *gates))):
            return forward(self, q, k, v, context, state, position, *gates)
        q, k, v = _without_padding(q, k, v, context)
        if state is not None:
            return forward(self, q, k, v, context, state, position, *gates)
        bad_queries, bad_keys = _bad_tokens(q), for_heads(_bad_tokens(k), v.shape[1]) | _bad_tokens(v)
        for gate in gates:
            bad_keys = bad_keys | _bad_tokens(gate.unsqueeze(1))
        # A key of zeros would write nothing into the state of a recurrence, and no query would see it.
        k = torch.where(k.isfinite(), k, 1)
        q, v = (torch.where(x.isfinite(), x, 0) for x in (q, v))
        gates = tuple(torch.where(x.isfinite(), x, 0) for x in gates)
        y, _ = forward(self, q, k, v, context, None, position, *gates)
        # Values of 1 at bad tokens: the output of a query is 0 unless it sees one.
        probe = bad_keys.to(v.dtype).expand(v.shape)
        unrecorded = recorded() if recording() else contextlib.nullcontext()  # hides the second run
        with torch.no_grad(), collect_auxiliary_losses(), unrecorded:
            scores = None if position is None else _Scores(position)
            seen, _ = forward(self.probe(), q, k, probe, context, None, scores, *gates)
        sees_bad = (seen != 0).any(-1, keepdim=True)
        return y.masked_fill(for_heads(bad_queries, y.shape[1]) | sees_bad, torch.nan), None

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class _Scores:
    """The terms of a position scheme in the scores, without its terms in the values.

    The terms in the values would add to the output of the probe.
    """

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
    """Return which tokens of x [B, H, T, D] have a value that is not finite, [B, H, T, 1]."""
    return ~x.isfinite().all(-1, keepdim=True)


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Return x [B, h, ...] for `heads` heads if they are more than h, the same for each of a group."""
    return x.repeat_interleave(heads // x.shape[1], 1) if heads > x.shape[1] else x


def _without_padding(q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v with zeros at the padding of the queries and of the new keys."""
    if context.kv_valid is None:
        return q, k, v
    padding = ~context.kv_valid[:, None, :, None].bool()
    queries = padding[:, :, context.offset : context.offset + q.shape[2]]
    keys = padding[:, :, -k.shape[2] :]
    return q.masked_fill(queries, 0), k.masked_fill(keys, 0), v.masked_fill(keys, 0)
