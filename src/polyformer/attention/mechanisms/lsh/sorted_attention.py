"""Attention over windows in a sorted order, forward and backward, without any tensor of T x T.

    y_i = sum_j p_ij v_j        p_ij = softmax, over every j in i's window of some round, of q_i . k_j * scale

A key in the windows of several rounds counts once: in the first of them. (Kitaev et al. 2020, equation 5,
subtract log c from the score of a key of c rounds, which is equivalent.) A token attends to itself only if
there is no other key. Padding gives zeros.

Each round gathers its tokens in sorted order; blocks of them attend to their own block and to the blocks that
their windows cover, with an exact mask from the spots. Cost: the scores of R T m pairs, and at most the same
number of masked pairs (twice that number without causality); memory in addition to inputs and output: R T
integers.

With the terms of a position scheme the rounds are computed one by one and joined by their log-sum-exp:

    y_i = sum_r e^(l_ir - l_i) o_ir        l_i = log sum_r e^(l_ir)

o_ir and l_ir are the output and the log-sum-exp of query i over its window in round r, without the keys of
its windows in earlier rounds. The scores of a block are in the order of buckets, so the scheme's tables are
looked up pair by pair (`tile_attention`).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.lsh.sorted_window import MASKED, Round, WindowBlocks, Windows, max_number
from polyformer.attention.mechanisms.pair_terms import (
    Pairs,
    PairTerms,
    PairTiles,
    TokenRows,
    max_elements,
    tile_attention,
)
from polyformer.core.ops.autograd import autocast_disabled, first_order
from polyformer.core.ops.cpu import parallel_map
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context

LOG2E, LN2 = math.log2(math.e), math.log(2)

EXACT = 1 << 22
"""Spots up to this value, and their halves, are exact in float32 with its 24 bits."""


@torch.compiler.disable(reason="windows are walked in Python")
def sorted_attention(heads: Heads, windows: Windows, context: Context, scale: float) -> Tensor:
    """Return the output [B, H, T, Dv] of q, k [B, H, T, D] and v [B, H, T, Dv] of the same tokens."""
    q, _, v = heads
    order, spots = _concatenate_heads(windows, q)
    blocks = WindowBlocks(windows, order.shape[-1], q)
    shape = len(order), order.shape[-1], -1
    rows = (x.reshape(shape) for x in heads)
    out, lse = SortedAttention.apply(blocks, scale, order, spots, *rows)  # type: ignore[misc]
    out, lse = out.view(v.shape), lse.view(v.shape[:3])
    # No other key: the token attends only to itself, which gives v.
    out = torch.where((lse == -torch.inf).unsqueeze(-1), v, out)
    if context.kv_valid is None:
        return out
    return out.masked_fill(~context.kv_valid[:, None, :, None], 0)


def _concatenate_heads(windows: Windows, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return order and spots [N, R, L] of rows of one or more heads, with spots too far apart to interact.

    Short heads are concatenated, up to the number with queries that fit into the cache.
    """
    order, spots = (x.flatten(0, 1) for x in (windows.order, windows.spots))
    heads, rounds, length = order.shape
    threads = 1 if like.is_cuda else torch.get_num_threads()
    # As many heads as fit into the cache, but at least one row for each thread.
    most = max(1, min(cache_capacity(like) // (length * like.shape[3]), heads // threads))
    group = max(size for size in range(1, most + 1) if heads % size == 0)
    number = torch.arange(group, device=order.device).view(1, group, 1, 1)
    last = max_number(spots) + windows.size
    # Heads of a row are more than a window apart: no token sees another head.
    spots = spots.unflatten(0, (-1, group)) + number * last
    order = order.unflatten(0, (-1, group)) + number * length
    precise = like.dtype if group * last < EXACT else torch.float64
    order, spots = (x.transpose(1, 2).reshape(-1, rounds, group * length) for x in (order, spots))
    return order, spots.to(precise)


class SortedAttention(torch.autograd.Function):
    """(order, spots [N, R, L], q, k [N, L, D], v [N, L, Dv]) -> out [N, L, Dv] and log-sum-exp [N, L]."""

    @staticmethod
    @autocast_disabled
    def forward(
        ctx: Any, blocks: WindowBlocks, scale: float, order: Tensor, spots: Tensor, *heads: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows with `sorted_forward`.

        heads: q, k, v one by one, because autograd follows no tensors inside of other values.
        """
        q, k, v = heads
        out, (top, total) = torch.empty_like(v), q.new_empty(2, *q.shape[:2], 1)

        def work(rows: Sequence[int]) -> None:
            for n in rows:
                rounds = (Round(blocks, r, order[n], spots[n]) for r in range(order.shape[1]))
                row = Heads(q[n] * (scale * LOG2E), k[n], v[n])
                out[n], top[n], total[n] = sorted_forward(rounds, row)

        parallel_map(work, range(len(q)), q.device)
        ctx.blocks, ctx.scale = blocks, scale
        lse = ((top + total.log2()) * LN2).masked_fill_(total == 0, -torch.inf).squeeze(-1)
        ctx.save_for_backward(order, spots, q, k, v, out, top, total)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order("LSH attention in sorted order")
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the rows with `sorted_backward`."""
        order, spots, q, k, v, out, top, total = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        # grad y_i . y_i = sum_r p_ir grad p_ir
        shift = (grad * out).sum(-1, keepdim=True)
        # Without keys all scores are far below 0: relative to 0 their weights are 0, not NaN.
        top, total = top.masked_fill(total == 0, 0), total.masked_fill(total == 0, 1)
        grad, shift = grad / total, shift / total

        def work(rows: Sequence[int]) -> None:
            for n in rows:
                rounds = (Round(ctx.blocks, r, order[n], spots[n]) for r in range(order.shape[1]))
                row = Heads(q[n] * (ctx.scale * LOG2E), k[n], v[n])
                grad_row = sorted_backward(rounds, row, grad[n], shift[n], top[n])
                for table, grad_x, factor in zip(gradients, grad_row, (ctx.scale, LN2, 1.0)):
                    torch.mul(grad_x, factor, out=table[n])

        parallel_map(work, range(len(q)), q.device)
        return None, None, None, None, *gradients


def sorted_forward(rounds: Iterator[Round], row: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return output [L, Dv], t and m [L, 1] of a row q, k [L, D], v [L, Dv]; m is 0 for tokens without keys.

    With the maximum score t_r, the mass m_r = sum_j e^(s_ij - t_r) and the sum o_r = sum_j e^(s_ij - t_r) v_j
    of every round r, and t = max_r t_r:

        y_i = sum_r e^(t_r - t) o_r / sum_r e^(t_r - t) m_r      lse_i = t + log sum_r e^(t_r - t) m_r

    Exponentials have base 2, which a processor computes faster: q is already multiplied by scale * log2(e).
    """
    q, k, v = row
    top, total, value = q.new_full((len(q), 1), -MASKED / 2), q.new_zeros(len(q), 1), torch.zeros_like(v)
    for round in rounds:
        queries, keys, values = round.queries(q), round.keys(k), round.keys(v)
        round_top, mass = (q.new_empty(*queries.shape[:2], 1) for _ in range(2))
        out = v.new_empty(*queries.shape[:2], v.shape[1])
        for start, stop in round.blocks.steps:
            weights = round.scores(queries, keys, start, stop)
            # Masked scores are near -UNSEEN: if all keys are masked, this lower bound makes all weights 0.
            torch.amax(weights, -1, keepdim=True, out=round_top[start:stop]).clamp_(min=-MASKED / 2)
            weights.sub_(round_top[start:stop]).exp2_()
            torch.sum(weights, -1, keepdim=True, out=mass[start:stop])
            torch.bmm(weights, values[start:stop], out=out[start:stop])
        round_top, mass, out = (round.unsorted(x) for x in (round_top, mass, out))
        # Online softmax over rounds: rescale the sums so far to the new maximum.
        highest = torch.maximum(top, round_top)
        kept, share = torch.exp2(top - highest), torch.exp2(round_top - highest)
        total, value = total * kept + mass * share, value.mul_(kept).addcmul_(out, share)
        top = highest
    return value / total.clamp_min(torch.finfo(q.dtype).tiny), top, total


def sorted_backward(
    rounds: Iterator[Round], row: Heads, grad: Tensor, shift: Tensor, top: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients [L, D], [L, D], [L, Dv] of a row; the weights are recomputed round by round.

        s_ij = scale q_i . k_j      p_ij = exp(s_ij - t_i) / m_i      y_i = sum_j p_ij v_j

        grad v_j  = sum_i p_ij grad y_i
        grad p_ij = grad y_i . v_j
        grad s_ij = p_ij (grad p_ij - sum_r p_ir grad p_ir) = p_ij (grad y_i . v_j - grad y_i . y_i)
        grad q_i  = scale sum_j grad s_ij k_j      grad k_j = scale sum_i grad s_ij q_i

    shift [L, 1]: grad y_i . y_i. top: [L, 1], t. The caller divides grad and shift by m. For exponentials of
    base 2, q is multiplied by scale * log2(e), as in the forward pass; the caller multiplies the returned
    grad q by scale, and grad k by ln(2).
    """
    q, k, v = row
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in row)
    for round in rounds:
        blocks = round.blocks
        queries, keys, values = round.queries(q), round.keys(k), round.keys(v)
        grads, shifts, tops = (round.queries(x) for x in (grad, shift, top))
        grad_queries = torch.empty_like(queries)
        grad_keys, grad_values = blocks.key_totals(k), blocks.key_totals(v)
        for start, stop in blocks.steps:
            # p_ij m_i, recomputed from the saved largest score.
            weights = round.scores(queries, keys, start, stop).sub_(tops[start:stop]).exp2_()
            blocks.add_keys(grad_values, start, torch.bmm(weights.mT, grads[start:stop]))
            grad_scores = torch.bmm(grads[start:stop], values[start:stop].mT)
            # grad s_ij = p_ij (grad p_ij - shift_i)
            grad_scores.sub_(shifts[start:stop]).mul_(weights)
            blocks.add_keys(grad_keys, start, torch.bmm(grad_scores.mT, queries[start:stop]))
            torch.bmm(grad_scores, keys[start:stop], out=grad_queries[start:stop])
        # Back to the order of slots; every token is in every round.
        grad_q += round.unsorted(grad_queries)
        grad_k += blocks.sorted_keys(grad_keys).index_select(0, round.place)
        grad_v += blocks.sorted_keys(grad_values).index_select(0, round.place)
    return grad_q, grad_k, grad_v


class SortedSlots(NamedTuple):
    """The tokens of all heads in the order of a round.

    order: [B H, Tk], their slots. spots: [rounds, B H Tk], of every token in this and in earlier rounds.
    """

    order: Tensor
    spots: Tensor
    windows: Windows


@torch.compiler.disable(reason="windows are walked in Python")
def sorted_attention_with_terms(heads: Heads, windows: Windows, context: Context, terms: PairTerms) -> Tensor:
    """Return the output [B, H, Tq, Dv] of q [B, H, Tq, D] over k [B, H, Tk, D] and v [B, H, Tk, Dv].

    q, k and v belong to the same tokens. A token attends to itself only if it sees no other key. Padding
    gives zeros.
    """
    q, k, v = heads
    batch, count, length = k.shape[:3]
    rows = TokenRows(*(x.flatten(0, 2) for x in (q, terms.content(q), k, v)))
    blocks = WindowBlocks(windows, length, like=q)
    outputs, sums, seen = [], [], torch.zeros(batch * count, length, dtype=torch.bool, device=q.device)
    for number in range(windows.order.shape[2]):
        order = windows.order[:, :, number].flatten(0, 1)  # [B H, Tk]
        spots = windows.spots.int().flatten(0, 1).transpose(0, 1)[: number + 1].flatten(1)  # [rounds, B H Tk]
        slots = SortedSlots(order, spots, windows)
        parts = [tile_attention(rows, tiles, terms) for tiles in _tiles(slots, blocks, q, context, terms)]
        place = order.argsort(1)
        out, lse, some = (
            torch.cat(x).flatten(0, 1).unflatten(0, (batch * count, -1))[:, :length] for x in zip(*parts)
        )
        outputs.append(out.gather(1, place.unsqueeze(-1).expand_as(out)))
        sums.append(lse.gather(1, place))
        seen |= some.gather(1, place)
    # Combine the rounds: a softmax over their log-sum-exp weighs the outputs of each round.
    lse = torch.stack(sums, -1)
    weights, _ = softmax(lse, lse > -torch.inf)
    out = (weights.unsqueeze(-2) @ torch.stack(outputs, -2)).squeeze(-2)
    out = torch.where(seen.unsqueeze(-1), out, _self_output(v, terms).flatten(0, 1))
    out = out.unflatten(0, (batch, count))
    if context.kv_valid is not None:
        out = out.masked_fill(~context.kv_valid[:, None, :, None], 0)
    return out[:, :, context.offset : context.offset + context.q_len]


def _tiles(
    slots: SortedSlots, blocks: WindowBlocks, q: Tensor, context: Context, terms: PairTerms
) -> Iterator[PairTiles]:
    """Yield the blocks of a round of all heads, in groups that fit into memory limits."""
    order, spots, windows = slots
    heads, length = q.shape[1], order.shape[1]
    # Slots of queries [n, Q] and keys [n, L], -1 where a block is not full.
    # `blocks` pads with zeros; the shift by 1 turns them into -1.
    queries = (blocks.queries((order + 1).unsqueeze(-1)) - 1).flatten(0, 1).squeeze(-1)
    keys = (blocks.keys((order + 1).unsqueeze(-1)) - 1).flatten(0, 1).squeeze(-1)
    own = torch.arange(len(order), device=order.device).repeat_interleave(blocks.count).unsqueeze(1)
    step = max(1, max_elements(q, terms) // terms.size(queries.shape[1], keys.shape[1]))
    for query, key, row in zip(*(x.split(step) for x in (queries, keys, own))):
        # A key of the past has no query: it gets a dummy query that is dropped at the end.
        q_idx = (query - context.offset).clamp(0, context.q_len - 1)
        key_row = row * length + key.clamp_min(0)
        query_spots, key_spots = spots[:, row * length + query.clamp_min(0)], spots[:, key_row]
        own = query.int().unsqueeze(-1), key.int().unsqueeze(1), query_spots, key_spots
        b, h, i = (x.unsqueeze(-1) for x in (row // heads, row % heads, q_idx))
        pairs = Pairs(b, h, i, key.clamp_min(0).unsqueeze(1))
        allowed = functools.partial(_visible, windows, *own)
        yield PairTiles(row * context.q_len + q_idx, key_row, pairs, allowed)


def _visible(windows: Windows, query: Tensor, key: Tensor, query_spots: Tensor, key_spots: Tensor) -> Tensor:
    """Return a mask [n, Q, L] for slots [n, Q, 1] and [n, 1, L], given their spots in all rounds so far.

    The spots are [r, n, Q or L]. Keys seen in an earlier round are masked.
    """
    *earlier, own = (windows.sees(q.unsqueeze(-1), k.unsqueeze(1)) for q, k in zip(query_spots, key_spots))
    seen = own & (query != key) & (query >= 0) & (key >= 0)
    for other in earlier:
        seen &= ~other
    return seen


def _self_output(v: Tensor, terms: PairTerms) -> Tensor:
    """Return the output of tokens that attend only to themselves: v plus the position value of distance 0."""
    relative = terms.relative
    if relative is None or relative.position_values is None:
        return v
    own = relative.entry(torch.zeros(1, dtype=torch.long, device=v.device))
    return v + relative.position_values[:, own]
