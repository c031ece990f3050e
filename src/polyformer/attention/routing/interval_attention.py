"""Attention in sorted order, forward and backward: each query sees an interval of the keys.

    y_i = sum_j p_ij v_j        p_ij = softmax over the interval of i, of q_i . k_j * scale

Tiles of neighbouring queries and the runs of keys that they see are gathered, multiplied out and put back
together. Backward takes the weights as they are where these take about as much memory as queries and keys,
and computes them again where they take more. All tiles share the memory that they are computed in: memory
that is new costs as much as the computing. All runs together are no longer than the keys and an interval for
each tile.

Scores must be small enough for exp to take them as they are, as those of normed vectors are.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.attention.routing.interval_tiles import Tiles, tiles
from polyformer.attention.routing.intervals import Intervals
from polyformer.ops.precision import as_written

_softmax_backward = torch.ops.aten._softmax_backward_data.out  # weights * (slope - sum of weights * slope)

HELD = 1 << 18
"""Scores held at once on a CPU, about what its cache takes."""

KEPT = 2
"""Weights are kept for backward if they take at most so many times the memory of queries and keys."""


def interval_attention(q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float) -> Tensor:
    """softmax(scale q k^T) v over the intervals: q [B, H, Tq, D], k, v [B, H, Tk, D] -> [B, H, Tq, D].

    A query that sees nothing, or is padding, gives zeros.
    """
    # As projections leave them in memory, [B, T, H, D].
    rows = (x.transpose(1, 2).flatten(0, 2) for x in (q, k, v))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    out = _Attention.apply(intervals, scale, keep, *rows)
    return out.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


class _Attention(torch.autograd.Function):
    """q [Nq, D], k [Nk, D], v [Nk, Dv] -> [Nq, Dv], none of them sorted."""

    @staticmethod
    @as_written
    def forward(ctx: Any, intervals: Intervals, scale: float, keep: bool, *rows: Tensor) -> Tensor:
        q, k, v = rows
        some, room = tiles(intervals, _held(q), q, k), _Room(q)
        whole = len(some) > 0 and len(intervals.queries) == len(q)
        out = _room_for(q, v.shape[1], whole)
        sizes = [math.prod(one.shape) for one in some]
        keep = keep and sum(sizes) <= KEPT * (q.numel() + k.numel())
        kept = q.new_empty(sum(sizes) if keep else max(sizes, default=0))
        parts = kept.split(sizes) if keep else [kept[:size] for size in sizes]
        for one, part in zip(some, parts):
            weights = _weights(room, one, q, k, scale, part)
            _put(out, one.to_queries, room.product("q", weights, room.keys(v, one)))
        ctx.some, ctx.sizes, ctx.scale, ctx.whole = some, sizes, scale, whole
        ctx.save_for_backward(q, k, v, kept if keep else None)
        return out[:-1]

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, kept = ctx.saved_tensors
        scale, room, grad = ctx.scale, _Room(q), grad.contiguous()
        dq = _room_for(q, q.shape[1], ctx.whole)
        dk, dv = (_room_for(x, x.shape[1], whole=False) for x in (k, v))
        parts = [None] * len(ctx.some) if kept is None else kept.split(ctx.sizes)
        for one, part in zip(ctx.some, parts):
            if part is None:
                weights = _weights(room, one, q, k, scale, room.take("weights", *one.shape))
            else:
                weights = part.view(one.shape)
            give = _put if one.sole else _add
            told = room.queries(grad, one)
            give(dv, one.to_keys, room.product("k", weights.mT, told))
            slope = room.product("scores", told, room.keys(v, one).mT)
            slope = _softmax_backward(slope, weights, -1, slope.dtype, grad_input=slope)
            _put(dq, one.to_queries, room.product("q", slope, room.keys(k, one), scale))
            give(dk, one.to_keys, room.product("k", slope.mT, room.queries(q, one), scale))
        return None, None, None, dq[:-1], dk[:-1], dv[:-1]


def _weights(room: "_Room", one: Tiles, q: Tensor, k: Tensor, scale: float, out: Tensor) -> Tensor:
    """p_ij [n, Q, L], zero where a query does not see a key, or is there only to fill its tile."""
    queries, keys = room.queries(q, one), room.keys(k, one)
    weights = out.view(one.shape).baddbmm_(queries, keys.mT, beta=0, alpha=scale).exp_()
    for limit, edge in one.limits:
        # 0 or 1 as numbers, as multiplying by booleans would first make them.
        seen = room.take("scores", len(edge), edge.shape[1], len(one.place))
        weights.mul_(limit(one.place, edge, out=seen))
    total = weights.sum(-1, keepdim=True)
    return weights.mul_(torch.where(total > 0, one.real / total, 0))


class _Room:
    """Memory used again for every tile, by name."""

    def __init__(self, like: Tensor):
        self.like, self.held = like, dict[str, Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        count = math.prod(shape)
        if name not in self.held or len(self.held[name]) < count:
            self.held[name] = self.like.new_empty(count)
        return self.held[name][:count].view(shape)

    def queries(self, x: Tensor, one: Tiles) -> Tensor:
        """The rows of x [N, D] that belong to the queries of tiles, [n, Q, D]."""
        out = self.take("q", len(one.queries), x.shape[1])
        return torch.index_select(x, 0, one.queries, out=out).view(len(one.real), -1, x.shape[1])

    def keys(self, x: Tensor, one: Tiles) -> Tensor:
        """Those that belong to their keys, [n, L, D]."""
        out = self.take("k", len(one.keys), x.shape[1])
        return torch.index_select(x, 0, one.keys, out=out).view(len(one.real), -1, x.shape[1])

    def product(self, name: str, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """scale * a @ b."""
        return self.take(name, len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


def _held(x: Tensor) -> int:
    return 64 * HELD if x.is_cuda else HELD


def _room_for(x: Tensor, width: int, whole: bool) -> Tensor:
    """A row for each of x [N, D], zeros unless all are to be written, and one for what only fills a tile."""
    make = torch.empty if whole else torch.zeros  # `new_zeros` would not take memory that is zero already
    return make(len(x) + 1, width, dtype=x.dtype, device=x.device)


def _put(total: Tensor, rows: Tensor, values: Tensor) -> None:
    total.index_copy_(0, rows, values.flatten(0, 1))


def _add(total: Tensor, rows: Tensor, values: Tensor) -> None:
    total.index_add_(0, rows, values.flatten(0, 1))
