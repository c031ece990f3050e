"""The chosen pairs, block by block: the queries that chose a block attend to its keys without a mask.

A running softmax joins the blocks of a query: with the greatest score m, sum l and weighted values y so far,

    m' = max(m, s)    l' = e^(m - m') l + sum_j e^(s_j - m')    y' = e^(m - m') y + sum_j e^(s_j - m') v_j

For inference: it writes to its sums.
"""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.chosen_blocks.choice import BlockTable


@torch.no_grad()
def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, table: BlockTable, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention over the chosen blocks [B, H, Tq, Dv] and its log-sum-exp [B, H, Tq].

    q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]; chosen [B, H, Tq, N] of bool. A query without
    blocks has zeros and minus infinity.
    """
    batch, heads = q.shape[:2]
    groups = heads // k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf)
    q = q * scale
    for row in range(batch):
        numbers = table.numbers[min(row, len(table.numbers) - 1)]
        order = numbers.argsort(stable=True).to(q.device)
        sizes = numbers.bincount(minlength=chosen.shape[3]).tolist()
        for kv_head in range(k.shape[1]):
            # Sorted by block, the keys of a block are neighbours.
            keys, values = (x[row, kv_head].index_select(0, order).split(sizes) for x in (k, v))
            for head in range(kv_head * groups, (kv_head + 1) * groups):
                own = row, head
                _add_blocks(q[own], keys, values, chosen[own], out[own], lse[own])
    return out, lse


def _add_blocks(
    q: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], chosen: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Write the attention of one head to out [Tq, Dv] and lse [Tq]."""
    counts = chosen.sum(0).tolist()
    queries = chosen.T.nonzero()[:, 1].to(q.device).split(counts)
    top, total = torch.full_like(lse, -torch.inf), torch.zeros_like(lse)
    # All blocks write their scores to the same memory, which stays in the cache.
    scratch = q.new_empty(max(counts, default=0) * max(map(len, keys), default=0))
    for k, v, rows in zip(keys, values, queries):
        if not len(rows):
            continue
        scores = scratch[: len(rows) * len(k)].view(len(rows), len(k))
        torch.mm(q.index_select(0, rows), k.T, out=scores)
        before = top.index_select(0, rows)
        most = torch.maximum(before, scores.amax(1))
        weights = scores.sub_(most[:, None]).exp_()
        fade = (before - most).exp_()
        top.index_copy_(0, rows, most)
        total.index_copy_(0, rows, total.index_select(0, rows).mul_(fade).add_(weights.sum(1)))
        sums = out.index_select(0, rows).mul_(fade[:, None]).addmm_(weights, v)
        out.index_copy_(0, rows, sums)
    out.div_(torch.where(total > 0, total, 1).unsqueeze(1))
    lse.copy_(top + total.log())
