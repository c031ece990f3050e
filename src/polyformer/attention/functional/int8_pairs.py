"""Attention of single queries to keys and values in int8, in a graph that torch compiles for a CPU.

    scores_j = q^T n_j s_j scale,    y = sum_j (p_j t_j) m_j,    p = softmax(scores)

for keys s_j n_j and values t_j m_j (`core.int8_cache`). The compiled code is a loop over the integers, which
reads a quarter of the memory of float32. Uncompiled, dequantizing all keys and `attend` is faster.
"""

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Full, restricted
from polyformer.core.int8_cache import Int8Pairs
from polyformer.core.recorded_graph import is_recorded
from polyformer.core.sequence.context import Context


def reads_integers(q: Tensor) -> bool:
    """Return whether `attend_to_integers` is faster: for a single query, in the compiled step of a CPU."""
    return is_recorded() and q.is_cpu and q.shape[2] == 1


def attend_to_integers(
    q: Tensor, pairs: Int8Pairs, pattern: Pattern | None, context: Context, scale: float | None
) -> Tensor:
    """Return attention of q [B, H, 1, D] to the pairs that the pattern and the context allow: [B, H, 1, Dv].

    Every query must see a key, as the query of a new token does.
    """
    keys, values, key_scale, value_scale = pairs
    wide = key_scale.dtype
    q_scaled = q.to(wide) * (q.shape[3] ** -0.5 if scale is None else scale)
    q_scaled = q_scaled.unflatten(1, (keys.shape[1], -1))  # [B, Hkv, G, 1, D]
    scores = (q_scaled * keys.unsqueeze(2).to(wide)).sum(-1) * key_scale.mT  # [B, Hkv, G, Tk]
    limits = restricted(pattern or Full(), context)
    mask = context.once(("int8 mask", limits), lambda: _mask(limits, context, q))
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1) * value_scale.mT
    y = (weights.unsqueeze(-1) * values.unsqueeze(2).to(wide)).sum(-2)  # [B, Hkv, G, Dv]
    return y.flatten(1, 2).unsqueeze(2).to(q.dtype)


def _mask(limits: Pattern, context: Context, q: Tensor) -> Tensor:
    """Return which keys the queries see: [B or 1, 1, 1, Tk], for limits that are the same for all heads."""
    rows = torch.arange(len(q), device=q.device).view(-1, 1, 1, 1)
    first, slots = rows[:1], torch.arange(context.kv_len, device=q.device)
    mask = limits.mask(context, rows, first, first.view(1, 1), slots)
    return mask.view(*[1] * (4 - mask.dim()), *mask.shape)
