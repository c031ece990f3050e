"""LSH attention of a few causal queries after many keys: only the keys in their windows are read."""

from typing import NamedTuple

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.lsh.definition import same_bucket
from polyformer.attention.mechanisms.pair_terms import Pairs, PairTerms
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.sequence.context import Context

MAX_LOOKUP_QUERIES, MIN_KEY_RATIO = 64, 64
"""The maximum number of queries for lookup, and the minimum ratio of keys to queries.

A lookup compares every query with every key, sorting moves every key some tens of times: 85 to 90 queries
take the same time both ways at 2048 and at 8192 keys, under AVX2 as under AVX-512.
"""


class PairList(NamedTuple):
    """P pairs of a query and a key in its window, query by query.

    rows: [P], the number of each pair's query among the B H Tq. slots: [P], the slot of its key. q, k, v: of
    the pairs, [P, D] and [P, Dv].
    """

    rows: Tensor
    slots: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def lookup_pairs(heads: Heads, buckets: Tensor, context: Context, window: int) -> PairList:
    """Return the pairs of each query and the keys in its window, whose buckets are [B, H, R, Tk]."""
    q, k, v = heads
    slots = torch.arange(context.q_len, device=q.device) + context.offset
    same = same_bucket(buckets, context)
    if context.q_len > 1:
        same &= torch.arange(context.kv_len, device=q.device) <= slots.view(-1, 1, 1)
    rows, keys = same.flatten(0, 3).nonzero(as_tuple=True)
    ends = torch.bincount(rows, minlength=same[..., 0].numel()).cumsum(0)
    # Pairs are sorted by query and round: the distance to the end of its group numbers a key from the last.
    last = ends[rows] - torch.arange(len(rows), device=q.device) <= window
    rows, keys = rows[last] // buckets.shape[2], keys[last]  # merge the rounds of each query
    number = torch.arange(q[..., 0].numel(), device=q.device)
    slots = slots.repeat(len(number) // context.q_len)
    # A mask instead of a list of pairs, so that a key of several rounds counts once.
    seen = torch.zeros(len(number), context.kv_len, dtype=torch.bool, device=q.device)
    seen[rows, keys] = True
    # A query attends to its own key only if it sees no other key.
    own = seen[number, slots]
    seen[number, slots] = False
    seen[number, slots] = own & ~seen.any(1)
    rows, keys = seen.nonzero(as_tuple=True)
    head = rows // context.q_len
    k, v = (at_least_float32(x.flatten(0, 1)[head, keys]) for x in (k, v))
    return PairList(rows, keys, q.flatten(0, 2)[rows], k, v)


def add_pair_terms(
    listed: PairList, scores: Tensor, content: Tensor, terms: PairTerms
) -> tuple[Tensor, Tensor]:
    """Return the scores [P] and values [P, Dv] of pairs with the terms of a position scheme.

    scores: [P], without the terms. content: [B, H, Tq, D].
    """
    rows, slots, _, k, v = listed
    heads, queries = content.shape[1:3]
    numbers = rows // queries // heads, rows // queries % heads, rows % queries, slots
    pairs = Pairs(*(x.view(-1, 1, 1) for x in numbers))
    met = content.flatten(0, 2)[rows].unsqueeze(1)
    scores = terms.scores(scores.view(-1, 1, 1), pairs, met, k.unsqueeze(1)).flatten()
    more = terms.values(torch.ones_like(pairs.b, dtype=v.dtype), pairs)
    return scores, v if more is None else v + more.squeeze(1)


def attend_to_pairs(rows: Tensor, scores: Tensor, v: Tensor, queries: int) -> Tensor:
    """Return softmax attention [queries, Dv] over pairs.

    Args:
        rows: [P], the query of each pair.
        scores: [P], the score of each pair.
        v: [P, Dv], the value of each pair.
        queries: the number of queries.
    """
    none = scores.new_zeros(queries)
    top = none.scatter_reduce(0, rows, scores.detach(), "amax", include_self=False)
    weights = (scores - top[rows]).exp()
    total = none.index_add(0, rows, weights)
    return v.new_zeros(queries, v.shape[1]).index_add(0, rows, (weights / total[rows]).unsqueeze(-1) * v)
