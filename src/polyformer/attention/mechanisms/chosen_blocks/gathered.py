"""The chosen pairs, block by block: the queries that chose a block attend to its keys without a mask.

With the outputs y_i and the log-sum-exp m_i of the near blocks, each chosen block adds its weights relative
to the near blocks, so no maximum is needed:

    w_ij = exp(q_i . k_j - m_i)        out_i = (y_i + sum_j w_ij v_j) / (1 + sum_j w_ij)

For inference: it writes to its sums.
"""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.chosen_blocks.choice import BlockTable


@torch.no_grad()
def with_chosen_blocks(
    heads: Heads, near: tuple[Tensor, Tensor], chosen: Tensor, table: BlockTable, scale: float
) -> Tensor | None:
    """Return attention over the near and the chosen blocks [B, H, Tq, Dv].

    near: the outputs and the log-sum-exp of the near blocks; chosen [B, H, Tq, N] of bool. None if scores
    exceed the near scores by an amount at which sums may overflow.
    """
    q, k, v = heads
    batch, groups = len(q), q.shape[1] // k.shape[1]
    out, total = near[0].clone(), (near[1] > -torch.inf).to(q.dtype)
    # A further channel subtracts the log-sum-exp from all scores of a query.
    q = torch.cat([q, -near[1].masked_fill(total == 0, 0).unsqueeze(-1)], -1)
    k = torch.cat([k * scale, torch.ones_like(k[..., :1])], -1)
    for row in range(batch):
        numbers = table.numbers[min(row, len(table.numbers) - 1)]
        order = numbers.argsort(stable=True).to(q.device)
        sizes = numbers.bincount(minlength=chosen.shape[3]).tolist()
        for kv_head in range(k.shape[1]):
            # Sorted by block, the keys of a block are neighbours.
            keys, values = (x[row, kv_head].index_select(0, order).split(sizes) for x in (k, v))
            for head in range(kv_head * groups, (kv_head + 1) * groups):
                own = row, head
                _add_blocks(q[own], keys, values, chosen[own], out[own], total[own])
    # Below the root of the largest number, products with values do not overflow.
    if not q.is_meta and not (total < torch.finfo(q.dtype).max ** 0.5).all():
        return None
    return out.div_(total.masked_fill_(total == 0, 1).unsqueeze(-1))


def _add_blocks(
    q: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    chosen: Tensor,
    out: Tensor,
    total: Tensor,
) -> None:
    """Add the weighted values of one head to out [Tq, Dv], and the weights to total [Tq]."""
    counts = chosen.sum(0).tolist()
    queries = chosen.T.nonzero()[:, 1].to(q.device).split(counts)
    # All blocks write their scores to the same memory, which stays in the cache.
    scratch = q.new_empty(max(counts, default=0) * max(map(len, keys), default=0))
    for k, v, rows in zip(keys, values, queries):
        if not len(rows):
            continue
        weights = scratch[: len(rows) * len(k)].view(len(rows), len(k))
        torch.mm(q.index_select(0, rows), k.T, out=weights).exp_()
        out.index_add_(0, rows, weights @ v)
        total.index_add_(0, rows, weights.sum(1))
