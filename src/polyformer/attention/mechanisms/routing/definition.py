"""The equation of routing attention over all pairs, the reference for tests of the fast form.

    y_i = sum_j p_ij v_j        p_ij = softmax over S_i of n(q_i) . n(k_j) / sqrt(D)

S_i has the last `window` keys j <= i with c(k_j) = c(q_i), and without causality the next `window` j > i. If
keys are the queries (`share_queries`), i itself is excluded unless it is the only key. A position scheme adds
its terms to scores and values (`pair_terms`).
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.mechanisms.pair_terms import PairTerms, add_terms, weighted_values
from polyformer.attention.patterns.implied import implied
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedHeads:
    """Normed q [B, H, Tq, D] and k [B, H, Tk, D], v [B, H, Tk, Dv]; clusters [B, H, Tq] and [B, H, Tk].

    terms: the terms of a position scheme, None for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_clusters: Tensor
    key_clusters: Tensor
    terms: PairTerms | None = None

    @property
    def scale(self) -> float:
        """The factor of the scores, 1 / sqrt(D)."""
        return self.q.shape[3] ** -0.5


def definition(heads: RoutedHeads, context: Context, window: int, share_queries: bool) -> Tensor:
    """Return the attention output [B, H, Tq, Dv]."""
    allowed = attention_mask(heads, context, window, share_queries)
    scores = add_terms(heads.q @ heads.k.mT * heads.scale, heads.q, heads.k, heads.terms)
    weights, _ = softmax(scores, allowed)
    return weighted_values(weights, heads.v, heads.terms)


def attention_mask(heads: RoutedHeads, context: Context, window: int, share_queries: bool) -> Tensor:
    """Return whether each key is in S_i of the query, [B, H, Tq, Tk]."""
    same = same_cluster(heads, context)
    query_slot, slot = slots(context, same.device)
    number = same.cumsum(-1)  # the first key of the cluster has 1
    # The keys of the cluster up to the query have the numbers 1 .. `before`.
    before = (same & (slot <= query_slot)).sum(-1, keepdim=True)
    last = before if context.causal else before + window
    allowed = same & (number > before - window) & (number <= last)
    if share_queries:
        allowed = allowed & ~((slot == query_slot) & (allowed.sum(-1, keepdim=True) > 1))
    return allowed


def same_cluster(heads: RoutedHeads, context: Context) -> Tensor:
    """Return whether query and key are non-padding tokens of the same document and cluster, [B, H, Tq, Tk].

    Causality is not applied: later keys are included.
    """
    same = heads.query_clusters.unsqueeze(-1) == heads.key_clusters.unsqueeze(-2)
    limits = implied(dataclasses.replace(context, causal=False, memo={}))
    if limits is not None:
        query_slot, slot = slots(context, same.device)
        b = torch.arange(len(same), device=same.device).view(-1, 1, 1, 1)
        same = same & limits.allows(context, b, torch.zeros_like(b), query_slot - context.offset, slot)
    # Padding queries attend to nothing.
    return same if context.q_valid is None else same & context.q_valid[:, None, :, None]


def slots(context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the slots of the queries, [Tq, 1], and of the keys, [Tk]."""
    queries = torch.arange(context.q_len, device=device).unsqueeze(1) + context.offset
    return queries, torch.arange(context.kv_len, device=device)
