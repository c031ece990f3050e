"""A position scheme's terms for all pairs of queries and keys, which the definitions of mechanisms add.

score_ij = mod((q_i . k_j + content_i . position_keys[d] + position_queries[d] . k_j) * scale + bias[d])
out_i    = sum_j p_ij (v_j + position_values[d])            with the distance d = slot(i) - slot(j)
"""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.pair_terms import PairTerms


def add_terms(
    scores: Tensor, q: Tensor, k: Tensor, terms: PairTerms | None, slots: Tensor | None = None
) -> Tensor:
    """Return scaled scores [B, H, Tq, Tk] of q [B, H, Tq, D] and k [B, H, Tk, D] with the terms of a scheme.

    slots: [B, Tk], the slots of the keys; by default key j has slot j.
    """
    if terms is None:
        return scores
    b, h, q_idx, kv_idx = _indices(scores, slots)
    relative = terms.relative
    if relative is not None:
        entry = relative.entry(terms.context.distance(q_idx, kv_idx)).expand(scores.shape)
        if relative.position_keys is not None:
            by_query = terms.content(q) @ relative.position_keys.mT  # [B, H, Tq, R]
            scores = scores + by_query.gather(-1, entry) * terms.scale
        if relative.position_queries is not None:
            by_key = k @ relative.position_queries.mT  # [B, H, Tk, R]
            scores = scores + by_key.gather(-1, entry.mT).mT * terms.scale
        if relative.bias is not None:
            scores = scores + relative.bias.expand(scores.shape[1], -1)[h, entry]
    return scores if terms.score_mod is None else terms.score_mod(scores, b, h, q_idx, kv_idx)


def weighted_values(
    weights: Tensor, v: Tensor, terms: PairTerms | None, slots: Tensor | None = None
) -> Tensor:
    """Return sum_j p_ij (v_j + position_values[d]) for weights [B, H, Tq, Tk] and v [B, H, Tk, Dv].

    slots: as in `add_terms`.
    """
    out = weights @ v
    if terms is None or terms.relative is None or terms.relative.position_values is None:
        return out
    _, _, q_idx, kv_idx = _indices(weights, slots)
    table = terms.relative.position_values
    entry = terms.relative.entry(terms.context.distance(q_idx, kv_idx)).expand(weights.shape)
    # Sum the weights of each distance, then multiply by the table: no [Tq, Tk, Dv] tensor.
    mass = weights.new_zeros(*weights.shape[:3], table.shape[1]).scatter_add(-1, entry, weights)
    return out + mass @ table


def _indices(scores: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [Tq, 1] and the keys' slots, [Tk] or [B, 1, 1, Tk]."""
    b, h, i, j = (torch.arange(size, device=scores.device) for size in scores.shape)
    kv_idx = j if slots is None else slots[:, None, None]
    return b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.unsqueeze(1), kv_idx
