"""Attention over windows in a sorted order, forward and backward, without any tensor of T x T.

    y_i = sum_j p_ij v_j        p_ij = softmax, over every j in i's window of some round, of q_i . k_j * scale

A key in the windows of several rounds counts once: in the first of them. (Kitaev et al. 2020, equation 5,
subtract log c from the score of a key of c rounds, which is equivalent.) A token attends to itself with
`attend_self`, otherwise only if there is no other key. Padding gives zeros.

Each round gathers its tokens in sorted order; blocks of them attend to their own block and to the blocks that
their windows cover, with an exact mask from the spots. The passes are in `sorted_forward.py` and
`sorted_backward.py`. Cost: the scores of R T m pairs, and at most the same number of masked pairs (twice that
number without causality); memory in addition to inputs and output: R T integers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.mechanisms.lsh.sorted_backward import sorted_backward
from polyformer.attention.mechanisms.lsh.sorted_forward import LN2, LOG2E, sorted_forward
from polyformer.attention.mechanisms.lsh.sorted_window import Windows, max_number
from polyformer.attention.mechanisms.lsh.window_blocks import Round, WindowBlocks
from polyformer.core.ops.cache_capacity import cache_capacity
from polyformer.core.ops.cpu_threads import parallel_map
from polyformer.core.ops.precision import autocast_disabled
from polyformer.core.ops.second_order import first_order
from polyformer.core.sequence.context import Context

EXACT = 1 << 22
"""Spots up to this value, and their halves, are exact in float32 with its 24 bits."""


@torch.compiler.disable(reason="windows are walked in Python")
def sorted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Windows,
    context: Context,
    scale: float,
    attend_self: bool = True,
) -> Tensor:
    """Return the output [B, H, T, Dv] of q, k [B, H, T, D] and v [B, H, T, Dv] of the same tokens."""
    order, spots = _concatenate_heads(windows, q)
    blocks = WindowBlocks(windows, order.shape[-1], attend_self, q)
    shape = len(order), order.shape[-1], -1
    rows = (x.reshape(shape) for x in (q, k, v))
    out, lse = SortedAttention.apply(blocks, scale, order, spots, *rows)  # type: ignore[misc]
    out, lse = out.view(v.shape), lse.view(v.shape[:3])
    if not attend_self:
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
        ctx: Any,
        blocks: WindowBlocks,
        scale: float,
        order: Tensor,
        spots: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows with `sorted_forward`."""
        out, lse = torch.empty_like(v), q.new_empty(q.shape[:2])

        def work(rows: Sequence[int]) -> None:
            for n in rows:
                rounds = (Round(blocks, r, order[n], spots[n]) for r in range(order.shape[1]))
                out[n], lse[n] = sorted_forward(rounds, q[n] * (scale * LOG2E), k[n], v[n])

        _run_rows(work, q)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(order, spots, q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order("LSH attention in sorted order")
    @autocast_disabled
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the rows with `sorted_backward`."""
        order, spots, q, k, v, out, lse = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        # grad y_i . y_i = sum_r p_ir grad p_ir
        shift = (grad * out).sum(-1, keepdim=True)
        # Without keys all scores are far below 0: with lse = 0 their weights are 0, not NaN.
        lse = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1) * LOG2E

        def work(rows: Sequence[int]) -> None:
            for n in rows:
                rounds = (Round(ctx.blocks, r, order[n], spots[n]) for r in range(order.shape[1]))
                scaled_q = q[n] * (ctx.scale * LOG2E)
                row = sorted_backward(rounds, scaled_q, k[n], v[n], grad[n], shift[n], lse[n])
                for table, grad_x, factor in zip(gradients, row, (ctx.scale, LN2, 1.0)):
                    torch.mul(grad_x, factor, out=table[n])

        _run_rows(work, q)
        return None, None, None, None, *gradients


def _run_rows(work: Callable[[Sequence[int]], None], q: Tensor) -> None:
    rows = range(len(q))
    if q.is_cuda:
        work(rows)
    else:
        parallel_map(work, rows)
