"""Routing attention over all pairs, and in sorted order, where each query attends to an interval of the keys.

    y_i = sum_j p_ij v_j        p_ij = softmax over S_i of s_ij        s_ij = n(q_i) . n(k_j) / sqrt(D)

S_i has the last `window` keys j <= i with c(k_j) = c(q_i), and without causality the next `window` j > i. If
keys are the queries (`share_queries`), i itself is excluded unless it is the only key. `definition` computes
all pairs and is the reference for tests; a position scheme adds its terms to scores and values.

In the order of clusters S_i is an interval. With the gradients of scores

    grad v_j  = sum_i p_ij grad y_i
    grad p_ij = grad y_i . v_j
    grad s_ij = p_ij (grad p_ij - sum_r p_ir grad p_ir)
    grad q_i  = scale sum_j grad s_ij k_j        grad k_j = scale sum_i grad s_ij q_i

Scores must be small enough that e^s does not overflow, which holds for normed vectors. Tiles of neighbouring
queries and the runs of keys in their intervals are gathered, multiplied, and the results are scattered back.
The weights p are saved for the backward pass if they take about the same memory as queries and keys, and are
recomputed if they take more. All tiles share one workspace, because allocating new memory costs as much as
the computation. All runs together are no longer than the keys and an interval for each tile.

With the terms of a position scheme every tile has the keys of a single cluster, so that all its scores belong
to one head. Neighbours in a cluster may have any distance, so the scheme's tables are looked up pair by pair
(`tile_attention`).

Which form runs:

    definition                        recorded weights, the backend "definition", and a single causal query
    interval_attention                all other calls without a position scheme
    interval_attention_with_terms     all other calls with a position scheme

None replaces another: on one core, tiles with terms take 2.2 times as long as `interval_attention` in
training at 1,024 and 4,096 tokens, and sorting the keys for a single query 4 to 10 times as long as the
definition (2026-11-30, float32).
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.mechanisms.pair_terms import (
    Pairs,
    PairTerms,
    PairTiles,
    TokenRows,
    add_terms,
    max_elements,
    tile_attention,
    weighted_values,
)
from polyformer.attention.mechanisms.routing.interval_tiles import BLOCK, Intervals, Tiles, tiles
from polyformer.attention.patterns.implied import implied
from polyformer.core.ops.autograd import autocast_disabled, first_order
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedHeads:
    """Normed q [B, H, Tq, D] and k [B, H, Tk, D], v [B, H, Tk, Dv]; clusters [B, H, Tq] and [B, H, Tk].

    terms: the terms of a position scheme, None for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_clusters: Tensor
    key_clusters: Tensor
    terms: PairTerms | None = None

    @property
    def scale(self) -> float:
        """The factor of the scores, 1 / sqrt(D)."""
        return self.q.shape[3] ** -0.5


def definition(heads: RoutedHeads, context: Context, window: int, share_queries: bool) -> Tensor:
    """Return the attention output [B, H, Tq, Dv]."""
    allowed = attention_mask(heads, context, window, share_queries)
    scores = add_terms(heads.q @ heads.k.mT * heads.scale, heads.q, heads.k, heads.terms)
    weights, _ = softmax(scores, allowed)
    return weighted_values(weights, heads.v, heads.terms)


def attention_mask(heads: RoutedHeads, context: Context, window: int, share_queries: bool) -> Tensor:
    """Return whether each key is in S_i of the query, [B, H, Tq, Tk]."""
    same = same_cluster(heads, context)
    query_slot, slot = slots(context, same.device)
    number = same.cumsum(-1)  # the first key of the cluster has 1
    # The keys of the cluster up to the query have the numbers 1 .. `before`.
    before = (same & (slot <= query_slot)).sum(-1, keepdim=True)
    last = before if context.causal else before + window
    allowed = same & (number > before - window) & (number <= last)
    if share_queries:
        allowed = allowed & ~((slot == query_slot) & (allowed.sum(-1, keepdim=True) > 1))
    return allowed


def same_cluster(heads: RoutedHeads, context: Context) -> Tensor:
    """Return whether query and key are non-padding tokens of the same document and cluster, [B, H, Tq, Tk].

    Causality is not applied: later keys are included.
    """
    same = heads.query_clusters.unsqueeze(-1) == heads.key_clusters.unsqueeze(-2)
    limits = implied(dataclasses.replace(context, causal=False, memo={}))
    if limits is not None:
        query_slot, slot = slots(context, same.device)
        b = torch.arange(len(same), device=same.device).view(-1, 1, 1, 1)
        same = same & limits.allows(context, b, torch.zeros_like(b), query_slot - context.offset, slot)
    # Padding queries attend to nothing.
    return same if context.q_valid is None else same & context.q_valid[:, None, :, None]


def slots(context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the slots of the queries, [Tq, 1], and of the keys, [Tk]."""
    queries = torch.arange(context.q_len, device=device).unsqueeze(1) + context.offset
    return queries, torch.arange(context.kv_len, device=device)


LOG2E = math.log2(math.e)

_grad_scores = torch.ops.aten._softmax_backward_data.out  # p * (grad p - sum of p * grad p)

MAX_SAVED = 2
"""The maximum memory of weights saved for backward, in multiples of the memory of queries and keys."""


def interval_attention(q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float) -> Tensor:
    """Return softmax(scale q k^T) v over the intervals: q [B, H, Tq, D], k, v [B, H, Tk, D] -> [B, H, Tq, D].

    A query without keys, and padding, gives zeros.
    """
    # The memory layout of the projections, [B, T, H, D], which avoids copies.
    rows = (x.transpose(1, 2).flatten(0, 2) for x in (q, k, v))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    out = IntervalAttention.apply(intervals, scale, keep, *rows)
    return out.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


class Workspace:
    """Named buffers that all tiles of a call reuse, as they are computed in turn."""

    def __init__(self, like: Tensor):
        self.like, self.buffers = like, dict[str, Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the buffer `name` with this shape; its values are what was last written to it."""
        count = math.prod(shape)
        if name not in self.buffers or len(self.buffers[name]) < count:
            self.buffers[name] = self.like.new_empty(count)
        return self.buffers[name][:count].view(shape)

    def queries(self, x: Tensor, tile: Tiles) -> Tensor:
        """Return the rows of x [N, D] for the queries of tiles, [n, Q, D]."""
        out = self.take("q", len(tile.queries), x.shape[1])
        return torch.index_select(x, 0, tile.queries, out=out).view(len(tile.real), -1, x.shape[1])

    def keys(self, x: Tensor, tile: Tiles) -> Tensor:
        """Return the rows of x [N, D] for the keys of tiles, [n, L, D]."""
        out = self.take("k", len(tile.keys), x.shape[1])
        return torch.index_select(x, 0, tile.keys, out=out).view(len(tile.real), -1, x.shape[1])

    def product(self, name: str, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """Return scale * a @ b in the buffer `name`."""
        return self.take(name, len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


class IntervalAttention(torch.autograd.Function):
    """q [Nq, D], k [Nk, D], v [Nk, Dv] -> [Nq, Dv], none of them sorted."""

    @staticmethod
    @autocast_disabled
    def forward(ctx: Any, intervals: Intervals, scale: float, keep: bool, *rows: Tensor) -> Tensor:
        """Compute tile by tile; `keep` saves the weights for the backward pass, unless they are too large."""
        q, k, v = rows
        groups, workspace = tiles(intervals, cache_capacity(q), q, k), Workspace(q)
        whole = len(groups) > 0 and len(intervals.queries) == len(q)
        out = _new_rows(q, v.shape[1], whole)
        sizes = [math.prod(tile.shape) for tile in groups]
        keep = keep and sum(sizes) <= MAX_SAVED * (q.numel() + k.numel())
        kept = q.new_empty(sum(sizes) if keep else max(sizes, default=0))
        parts = kept.split(sizes) if keep else [kept[:size] for size in sizes]
        for tile, part in zip(groups, parts):
            weights = _weights(workspace, tile, q, k, scale, part)
            _put(out, tile.to_queries, workspace.product("q", weights, workspace.keys(v, tile)))
        ctx.groups, ctx.sizes, ctx.scale, ctx.whole = groups, sizes, scale, whole
        ctx.save_for_backward(q, k, v, kept if keep else None)
        return out[:-1]

    @staticmethod
    @first_order("routing attention in sorted order")
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients tile by tile, by the equations above."""
        q, k, v, kept = ctx.saved_tensors
        scale, workspace, grad = ctx.scale, Workspace(q), grad.contiguous()
        grad_q = _new_rows(q, q.shape[1], ctx.whole)
        grad_k, grad_v = (_new_rows(x, x.shape[1], whole=False) for x in (k, v))
        parts = [None] * len(ctx.groups) if kept is None else kept.split(ctx.sizes)
        for tile, part in zip(ctx.groups, parts):
            if part is None:
                weights = _weights(workspace, tile, q, k, scale, workspace.take("weights", *tile.shape))
            else:
                weights = part.view(tile.shape)
            # Keys of several tiles receive the sum of their gradients.
            write = _put if tile.exclusive else _add
            grad_y = workspace.queries(grad, tile)
            write(grad_v, tile.to_keys, workspace.product("k", weights.mT, grad_y))
            grad_s = workspace.product("scores", grad_y, workspace.keys(v, tile).mT)
            grad_s = _grad_scores(grad_s, weights, -1, grad_s.dtype, grad_input=grad_s)
            _put(grad_q, tile.to_queries, workspace.product("q", grad_s, workspace.keys(k, tile), scale))
            write(grad_k, tile.to_keys, workspace.product("k", grad_s.mT, workspace.queries(q, tile), scale))
        return None, None, None, grad_q[:-1], grad_k[:-1], grad_v[:-1]


def _weights(workspace: Workspace, tile: Tiles, q: Tensor, k: Tensor, scale: float, out: Tensor) -> Tensor:
    """Return p_ij [n, Q, L], zero for masked keys and for queries that pad their tile."""
    queries, keys = workspace.queries(q, tile), workspace.keys(k, tile)
    # Exponentials of base 2 are faster to compute.
    weights = out.view(tile.shape).baddbmm_(queries, keys.mT, beta=0, alpha=scale * LOG2E).exp2_()
    for limit, edge in tile.limits:
        # 0 or 1 as floats: multiplying by booleans would convert them first.
        seen = workspace.take("scores", len(edge), edge.shape[1], len(tile.place))
        weights.mul_(limit(tile.place, edge, out=seen))
    total = weights.sum(-1, keepdim=True)
    return weights.mul_(torch.where(total > 0, tile.real / total, 0))


def _new_rows(x: Tensor, width: int, whole: bool) -> Tensor:
    """Return a row of `width` per row of x [N, D], and a last row for padding.

    The rows are zeros, or uninitialized if `whole`: all will be written.
    """
    make = torch.empty if whole else torch.zeros  # `new_zeros` clears memory that is zero already
    return make(len(x) + 1, width, dtype=x.dtype, device=x.device)


def _put(total: Tensor, rows: Tensor, values: Tensor) -> None:
    total.index_copy_(0, rows, values.flatten(0, 1))


def _add(total: Tensor, rows: Tensor, values: Tensor) -> None:
    total.index_add_(0, rows, values.flatten(0, 1))


def interval_attention_with_terms(
    heads: RoutedHeads, intervals: Intervals, window: int, terms: PairTerms
) -> Tensor:
    """Return output [B, H, Tq, Dv] over the intervals of at most `window` keys; zeros without keys."""
    # The memory layout of the projections, [B, T, H, D], which avoids copies.
    content = terms.content(heads.q)
    rows = TokenRows(*(x.transpose(1, 2).flatten(0, 2) for x in (heads.q, content, heads.k, heads.v)))
    pairs = max_elements(heads.q, terms) * BLOCK * window // terms.size(BLOCK, window)
    groups = tiles(intervals, max(1, pairs), rows.q, rows.k, shared=False)
    shape = heads.q.shape[:3], heads.k.shape[2]
    parts = [(tile.to_queries, tile_attention(rows, _pair_tiles(tile, *shape), terms)[0]) for tile in groups]
    out = heads.q.new_zeros(len(rows.q) + 1, heads.v.shape[3])  # the last row is for padding
    if parts:
        places, outputs = zip(*parts)
        out = out.index_copy(0, torch.cat(places), torch.cat([x.flatten(0, 1) for x in outputs]))
    return out[:-1].view(heads.q.shape[0], heads.q.shape[2], heads.q.shape[1], -1).transpose(1, 2)


def _pair_tiles(tile: Tiles, queries: torch.Size, keys: int) -> PairTiles:
    """Return the tiles of one size, of queries [B, H, Tq] and `keys` keys per head."""
    _, heads, length = queries
    count = len(tile.real)
    query, key = tile.queries.view(count, -1), tile.keys.view(count, -1)
    first = query[:, :1].unsqueeze(-1)
    q_idx, slots = query // heads % length, key // heads % keys
    pairs = Pairs(first // heads // length, first % heads, q_idx.unsqueeze(-1), slots.unsqueeze(1))

    def allowed() -> Tensor:
        seen = (tile.real > 0).expand(tile.shape)
        for limit, edge in tile.limits:
            seen = seen & limit(tile.place, edge)
        return seen

    return PairTiles(query, key, pairs, allowed)
