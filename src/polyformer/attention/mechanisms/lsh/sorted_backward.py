"""The backward pass of attention in sorted order, which recomputes the weights round by round.

    s_ij = scale q_i . k_j        p_ij = exp(s_ij - lse_i)        y_i = sum_j p_ij v_j

    grad v_j  = sum_i p_ij grad y_i
    grad p_ij = grad y_i . v_j
    grad s_ij = p_ij (grad p_ij - sum_r p_ir grad p_ir) = p_ij (grad y_i . v_j - grad y_i . y_i)
    grad q_i  = scale sum_j grad s_ij k_j        grad k_j = scale sum_i grad s_ij q_i

`shift` is grad y_i . y_i. For exponentials of base 2, q is multiplied by scale * log2(e) and lse by log2(e);
the caller multiplies the returned grad q by scale, and grad k by ln(2).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from polyformer.attention.mechanisms.lsh.window_blocks import Round


def sorted_backward(
    rounds: Iterator[Round], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, shift: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients [L, D], [L, D], [L, Dv] of a row, for q and k up to the factors above.

    shift, lse: [L, 1].
    """
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    for round in rounds:
        blocks = round.blocks
        queries, keys, values = round.queries(q), round.keys(k), round.keys(v)
        grads, shifts, sums = (round.queries(x) for x in (grad, shift, lse))
        grad_queries = torch.empty_like(queries)
        grad_keys, grad_values = blocks.key_totals(k), blocks.key_totals(v)
        for start, stop in blocks.steps:
            # p_ij, recomputed from the saved log-sum-exp.
            weights = round.scores(queries, keys, start, stop).sub_(sums[start:stop]).exp2_()
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
