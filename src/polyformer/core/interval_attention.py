"""Attention in sorted order: each query sees an interval of the keys, and intervals only move on.

Queries and keys are sorted apart, by (row, document, cluster, slot). The last w keys of a query's cluster at
or before it are then consecutive, and neighbouring queries see nearly the same: a block of queries needs one
run of keys, and all runs together are no longer than the keys and w for each block. Blocks with runs of like
length are multiplied out together; backward computes weights again.

Scores must be small enough for exp to take them as they are, as those of normed vectors are.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.core.context import Context

BLOCK = 64
"""Queries that share a run of keys."""

HELD = 1 << 18
"""Scores held at once on a CPU, about what its cache takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Intervals:
    """Who sees whom, once sorted.

    Args:
        queries: [Nq], the sorted queries as indices into [B Tq H]; padding is left out.
        keys: [Nk], likewise into [B Tk H].
        first, last: [Nq], the places first <= place < last of `keys` that each sorted query sees.
        hidden: [Nq], a place inside that a query does not see, or -1; None where there is none.
    """

    queries: Tensor
    keys: Tensor
    first: Tensor
    last: Tensor
    hidden: Tensor | None = None


@torch.no_grad()
def cluster_intervals(of_queries: Tensor, of_keys: Tensor, count: int, window: int, context: Context,
                      alone: bool = False) -> Intervals:  # fmt: skip
    """The last `window` keys of a query's cluster at or before it; if not causal also the next `window`.

    of_queries [B, H, Tq], of_keys [B, H, Tk]: clusters below `count`. alone: a query sees the key of its own
    slot only where it sees no other.
    """
    length = of_keys.shape[2]
    queries, of_query = _sorted(of_queries, count, context, context.offset)
    keys, of_key = _sorted(of_keys, count, context, 0)
    cluster = of_query // length * length  # the code of a first slot
    upto = torch.searchsorted(of_key, of_query, right=True)
    first = torch.maximum(torch.searchsorted(of_key, cluster), upto - window)
    last = upto
    if not context.causal:
        last = torch.minimum(torch.searchsorted(of_key, cluster + length), upto + window)
    hidden = None
    if alone and len(keys):
        own = (upto - 1).clamp_min(0)
        hidden = torch.where((of_key[own] == of_query) & (last - first > 1), own, -1)
    return Intervals(queries, keys, first, last, hidden)


def _sorted(clusters: Tensor, count: int, context: Context, offset: int) -> tuple[Tensor, Tensor]:
    """The order of real tokens and their codes: (row, document, cluster, slot) as one number, ascending."""
    rows, heads, length = clusters.shape
    slots = torch.arange(offset, offset + length, device=clusters.device)
    group = torch.arange(rows * heads, device=clusters.device).view(rows, heads, 1)
    if context.kv_doc is not None:  # numbered by their first slots
        doc = context.kv_doc[:, slots].contiguous()
        starts = torch.searchsorted(context.kv_doc.contiguous(), doc)
        group = group * context.kv_len + starts.unsqueeze(1)
    group = group * count + clusters
    real = len(group.view(-1))
    if context.kv_valid is not None:
        valid = context.kv_valid[:, slots].bool()
        group = group.masked_fill(~valid.unsqueeze(1), int(group.max()) + 1)
        real = heads * int(valid.sum())
    # torch sorts one long row of whole numbers by radix, the faster the smaller they are.
    small = group.to(torch.int32) if int(group.max()) < 2**31 else group
    order = small.flatten().sort(stable=True).indices[:real]
    place = torch.arange(rows * length * heads, device=clusters.device).view(rows, length, heads)
    return place.transpose(1, 2).flatten()[order], (group * context.kv_len + slots).flatten()[order]


def interval_attention(q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float) -> Tensor:
    """softmax(scale q k^T) v over the intervals: q [B, H, Tq, D], k, v [B, H, Tk, D] -> [B, H, Tq, D].

    A query that sees nothing, or is padding, gives zeros.
    """
    # As projections leave them in memory, [B, T, H, D].
    rows = (x.transpose(1, 2).flatten(0, 2) for x in (q, k, v))
    out = _Attention.apply(intervals, scale, *rows)
    return out.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


class _Blocks(NamedTuple):
    """n blocks of queries whose runs of keys are of one length L.

    queries [n, BLOCK], keys [n, L], not sorted; begin [n], the first place of each run; seen [n, BLOCK, L].
    Beyond the first `count` queries there are none, but what makes the last block whole.
    """

    queries: Tensor
    keys: Tensor
    begin: Tensor
    seen: Tensor
    count: int


class _Attention(torch.autograd.Function):
    """q [Nq, D], k [Nk, D], v [Nk, Dv] -> [Nq, Dv], none of them sorted."""

    @staticmethod
    def forward(ctx: Any, intervals: Intervals, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, inverse = _like(q, v.shape[1], intervals.queries), q.new_empty(len(q), 1)
        for some in _blocks(intervals):
            queries = _rows(q, some.queries).mul_(scale)
            weights = torch.bmm(queries, _rows(k, some.keys).mT).exp_().mul_(some.seen)
            total = weights.sum(-1, keepdim=True)
            shares = torch.where(total > 0, total.reciprocal(), 0)
            _put(inverse, some, shares)
            _put(out, some, torch.bmm(weights, _rows(v, some.keys)).mul_(shares))
        ctx.intervals, ctx.scale = intervals, scale
        ctx.save_for_backward(q, k, v, out, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, inverse = ctx.saved_tensors
        intervals: Intervals = ctx.intervals
        dq = _like(q, q.shape[1], intervals.queries)
        dk, dv = (x.new_zeros(len(intervals.keys), x.shape[1]) for x in (k, v))  # sorted
        for some in _blocks(intervals):
            queries, told, keys = _rows(q, some.queries), _rows(grad, some.queries), _rows(k, some.keys)
            queries = queries.mul_(ctx.scale)
            mean = (told * _rows(out, some.queries)).sum(-1, keepdim=True)
            weights = torch.bmm(queries, keys.mT).exp_().mul_(some.seen).mul_(_rows(inverse, some.queries))
            _add(dv, torch.bmm(weights.mT, told), some)
            slope = torch.bmm(told, _rows(v, some.keys).mT).sub_(mean).mul_(weights)
            _put(dq, some, torch.bmm(slope, keys).mul_(ctx.scale))
            _add(dk, torch.bmm(slope.mT, queries), some)
        whole = (_like(x, x.shape[1], intervals.keys).index_copy_(0, intervals.keys, one)
                 for x, one in ((k, dk), (v, dv)))  # fmt: skip
        return None, None, dq, *whole


def _blocks(intervals: Intervals) -> Iterator[_Blocks]:
    """All blocks, as many at once as may be held."""
    first, last, hidden = intervals.first, intervals.last, intervals.hidden
    if not len(first):
        return
    blocks = -(-len(first) // BLOCK)
    missing = blocks * BLOCK - len(first)  # queries that see nothing make the last block whole
    places = torch.arange(blocks * BLOCK, device=first.device).clamp_max(len(first) - 1).view(-1, BLOCK)
    first, last = first[places], last[places]
    first[-1, BLOCK - missing :] = last[-1, -1]
    begin = first[:, 0]
    first, last = ((x - begin.unsqueeze(1)).to(torch.int32).unsqueeze(2) for x in (first, last))
    if hidden is not None:
        hidden = (hidden[places] - begin.unsqueeze(1)).to(torch.int32).unsqueeze(2)
    lengths = _rounded(last[:, -1, 0].clamp_min(1))
    queries, end = intervals.queries[places], len(intervals.keys) - 1
    held = HELD if first.device.type == "cpu" else 64 * HELD
    for length in lengths.unique().tolist():
        place = torch.arange(length, device=begin.device, dtype=torch.int32)
        for own in (lengths == length).nonzero().flatten().split(max(1, held // (BLOCK * length))):
            seen = (place >= first[own]) & (place < last[own])
            if hidden is not None:
                seen &= place != hidden[own]
            keys = intervals.keys[(begin[own].unsqueeze(1) + place).clamp_max(end)]
            count = len(own) * BLOCK - missing * int(own[-1] == blocks - 1)
            yield _Blocks(queries[own], keys, begin[own], seen, count)


def _rounded(lengths: Tensor) -> Tensor:
    """A few different lengths, at least as long: multiples of 16, or of an eighth of a power of two."""
    step = (2.0 ** (lengths.double().log2().floor() - 3)).clamp_min(16).long()
    return (lengths + step - 1) // step * step


def _like(x: Tensor, width: int, order: Tensor) -> Tensor:
    """A row for each of x [N, D], zeros unless all are in `order` and will be written."""
    return x.new_empty(len(x), width) if len(order) == len(x) else x.new_zeros(len(x), width)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [N, D]: [*index, D]."""
    return x.index_select(0, index.flatten()).view(*index.shape, -1)


def _put(total: Tensor, some: _Blocks, values: Tensor) -> None:
    total.index_copy_(0, some.queries.flatten()[: some.count], values.flatten(0, 1)[: some.count])


def _add(total: Tensor, runs: Tensor, some: _Blocks) -> None:
    """Adds runs [n, L, D] to total [Nk, D], sorted; what a run has beyond the end is zero."""
    if total.is_cuda:
        places = some.begin.unsqueeze(1) + torch.arange(runs.shape[1], device=total.device)
        total.index_add_(0, places.clamp_max(len(total) - 1).flatten(), runs.flatten(0, 1))
        return
    for begin, run in zip(some.begin.tolist(), runs):
        inside = total[begin : begin + len(run)]
        inside += run[: len(inside)]
