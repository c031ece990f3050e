"""The forward pass of attention in sorted order, which combines rounds by their log-sum-exp.

With the maximum score t_r, the mass m_r = sum_j e^(s_ij - t_r) and the sum o_r = sum_j e^(s_ij - t_r) v_j of
every round r, and t = max_r t_r:

    y_i = sum_r e^(t_r - t) o_r / sum_r e^(t_r - t) m_r        lse_i = t + log sum_r e^(t_r - t) m_r

Exponentials have base 2, which a processor computes faster: q is already multiplied by scale * log2(e).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from polyformer.attention.mechanisms.lsh.window_blocks import MASKED, Round

LOG2E, LN2 = math.log2(math.e), math.log(2)


def sorted_forward(rounds: Iterator[Round], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [L, Dv] and log-sum-exp [L] of a row, with -inf for tokens without keys."""
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
    lse = ((top + total.log2()) * LN2).masked_fill_(total == 0, -torch.inf)
    return value / total.clamp_min(torch.finfo(q.dtype).tiny), lse.squeeze(-1)
