"""Softmax attention of each block of queries to a block of keys, computed for a run of blocks together."""

import torch
from torch import Tensor

from polyformer.core.ops.cache_capacity import cache_capacity
from polyformer.core.ops.dropout import dropout
from polyformer.core.ops.softmax import softmax

RUN_FACTOR = 16
"""The size of a run's scores in multiples of `cache_capacity`: smaller runs have too few blocks a product."""


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, rate: float) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias) v, [B, H, A, Q, Dv].

    Args:
        q: [B, H, A, Q, D].
        k, v: [B, H, A or 1, K, D]; a dimension of 1 is shared by all blocks of queries.
        bias: broadcasts to the scores [B, H, A, Q, K]; minus infinity where a key is masked.
        rate: the dropout probability.
    """
    q = q * q.shape[4] ** -0.5
    rows = q.shape[0] * q.shape[1] * q.shape[3] * k.shape[3]
    # With dropout all blocks are one run, so that a seed gives the same mask on all processors.
    whole = rate > 0 or torch.compiler.is_compiling()
    step = q.shape[2] if whole else max(1, RUN_FACTOR * cache_capacity(q) // rows)
    parts = []
    for start in range(0, q.shape[2], step):
        run = slice(start, start + step)
        keys, values, own = (x if x.shape[2] == 1 else x[:, :, run] for x in (k, v, bias))
        weights, _ = softmax(q[:, :, run] @ keys.mT + own)
        parts.append(dropout(weights, rate) @ values)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
