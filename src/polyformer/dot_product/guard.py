"""What no mechanism should have to think of: calls without a token, and numbers that are not finite.

`isolation.py` keeps NaN and infinity in `attend` with those who see them. Mechanisms that compute by
themselves run twice where something is not finite: with zeros in its place, and to see
who would have seen it (values of 1 where a token is not finite, of 0 elsewhere). Those queries get NaN, all
others what they get anyway, forward and backward. The rare case pays for it; a usual call for three sums.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyformer.core.auxiliary_losses import collect_auxiliary_losses
from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.dot_product.isolation import is_finite, is_readable
from polyformer.ops.softmax import recorded, recording
from polyformer.sequence.context import Context

M = TypeVar("M")
Mixed = tuple[Tensor, State | None]
Forward = Callable[[M, Tensor, Tensor, Tensor, Context, State | None, Any], Mixed]


def guarded(forward: Forward[M]) -> Forward[M]:
    """`Mechanism.forward` that takes calls without a row or a token, and keeps what is not finite apart.

    Padding is zero where anything is not finite. With a state only padding is kept apart: what is not finite
    in the past is seen by what follows. Heads of no width are refused.
    """

    @functools.wraps(forward)
    def run(
        self: M, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: Any
    ) -> Mixed:
        if not q.shape[3]:
            raise InputError(f"q, k: expected heads of a width of 1 or more, got {tuple(q.shape)}")
        if not q.shape[0] or not q.shape[2]:  # the state is what it was: there is nothing to remember
            return empty(q, v), state
        if not is_readable(q) or all(map(is_finite, (q, k, v))):
            return forward(self, q, k, v, context, state, position)
        q, k, v = _without_padding(q, k, v, context)
        if state is not None:
            return forward(self, q, k, v, context, state, position)
        asks, shows = _spoilt(q), _spoilt(k) | _spoilt(v)
        q, k, v = (torch.where(x.isfinite(), x, 0) for x in (q, k, v))
        y, _ = forward(self, q, k, v, context, None, position)
        told = shows.to(v.dtype).expand(v.shape)
        looks = recorded() if recording() else contextlib.nullcontext()  # nobody should see this run
        with torch.no_grad(), collect_auxiliary_losses(), looks:
            seen, _ = forward(self, q, k, told, context, None, position)
        return y.masked_fill(asks | _any(seen != 0), torch.nan), None

    return run


def empty(q: Tensor, v: Tensor) -> Tensor:
    """The output [B, H, Tq, Dv] of no queries q [B, H, Tq, D], and a part of its graph."""
    return q[..., :1].expand(*q.shape[:3], v.shape[3])


def _spoilt(x: Tensor) -> Tensor:
    """Which tokens of x [B, H, T, D] have something that is not finite, [B, H, T, 1]."""
    return _any(~x.isfinite())


def _any(x: Tensor) -> Tensor:
    return x.any(-1, keepdim=True)


def _without_padding(q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros at the padding of the queries and of the new keys."""
    if context.kv_valid is None:
        return q, k, v
    padding = ~context.kv_valid[:, None, :, None].bool()
    asking = padding[:, :, context.offset : context.offset + q.shape[2]]
    told = padding[:, :, -k.shape[2] :]
    return q.masked_fill(asking, 0), k.masked_fill(told, 0), v.masked_fill(told, 0)
