"""The equation of LSH attention over all pairs of tokens, the reference for tests of the fast form.

S_i = union over the rounds r of the last m slots j <= i with h_r(k_j) = h_r(k_i), and i itself excluded
      unless it is the only slot; without causality also of the next m - 1 slots j > i of the bucket
y_i = sum_(j in S_i) p_ij v_j        p_ij = softmax over S_i of q_i . k_j * scale

A position scheme adds its terms to scores and values (`pair_terms`).
"""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.pair_terms import PairTerms, add_terms, weighted_values
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context


def definition(
    heads: Heads,
    buckets: Tensor,
    context: Context,
    window: int,
    scale: float,
    terms: PairTerms | None,
) -> Tensor:
    """Return the attention output [B, H, Tq, Dv].

    Args:
        heads: as many for keys as for queries; the keys have unit length.
        buckets: the buckets h of the keys, [B, H, R, Tk].
        context: describes the queries and keys.
        window: m, the number of keys of its bucket that a query attends to.
        scale: the factor of the scores.
        terms: the terms of a position scheme, None for none.
    """
    q, k, v = heads
    scores = add_terms(q @ k.mT * scale, q, k, terms)
    weights, _ = softmax(scores, attention_mask(buckets, context, window))
    return weighted_values(weights, v, terms)


def attention_mask(buckets: Tensor, context: Context, window: int) -> Tensor:
    """Return whether each key is in S_i of the query, [B, H, Tq, Tk]."""
    query = torch.arange(context.q_len, device=buckets.device).view(-1, 1, 1) + context.offset
    key = torch.arange(context.kv_len, device=buckets.device)
    same = same_bucket(buckets, context)
    before, after = same & (key <= query), same & (key > query)
    # The reversed cumulative sum counts a bucket's keys from each key up to the query.
    seen = before & (before.flip(-1).cumsum(-1).flip(-1) <= window)
    if not context.causal:
        seen |= after & (after.cumsum(-1) < window)
    seen, itself = seen.any(3), (key == query).squeeze(1)
    # A token attends to itself only if it sees no other key.
    others = seen & ~itself
    return others | (seen & ~others.any(-1, keepdim=True))


def same_bucket(buckets: Tensor, context: Context) -> Tensor:
    """Return whether query and key share a bucket and document and are not padding, [B, H, Tq, R, Tk]."""
    slots = slice(context.offset, context.offset + context.q_len)
    same = buckets[..., slots].transpose(2, 3).unsqueeze(-1) == buckets.unsqueeze(2)
    if context.q_doc is not None and context.kv_doc is not None:
        same &= (context.q_doc.unsqueeze(-1) == context.kv_doc.unsqueeze(-2))[:, None, :, None]
    if context.kv_valid is not None:
        valid = context.kv_valid
        same &= (valid[:, slots].unsqueeze(-1) & valid.unsqueeze(-2))[:, None, :, None]
    return same
