"""Routing attention of one causal query per row, which reads only the keys in its window and all clusters."""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.pair_terms import Pairs
from polyformer.attention.mechanisms.routing.definition import RoutedHeads, same_cluster, slots
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context


def single_query(heads: RoutedHeads, context: Context, window: int, share_queries: bool) -> Tensor:
    """Return the attention output [B, H, 1, Dv]."""
    same = same_cluster(heads, context).squeeze(2)
    (own,), slot = slots(context, same.device)
    chosen = torch.where(same & (slot <= own), slot, -1)
    # The largest slots of the cluster are its last keys; -1 marks missing keys.
    chosen = chosen.topk(min(window, context.kv_len), dim=-1).values  # [B, H, W]
    if share_queries:
        others = (chosen >= 0).sum(-1, keepdim=True) > 1
        chosen = chosen.masked_fill((chosen == own) & others, -1)
    place = chosen.clamp_min(0).unsqueeze(-1)
    k, v = (x.gather(2, place.expand(-1, -1, -1, x.shape[3])) for x in (heads.k, heads.v))
    scores, terms = heads.q @ k.mT * heads.scale, heads.terms
    if terms is None:
        weights, _ = softmax(scores, (chosen >= 0).unsqueeze(2))
        return weights @ v
    batch, count = chosen.shape[:2]
    b, h = (torch.arange(size, device=chosen.device) for size in (batch, count))
    first = torch.zeros(batch * count, 1, 1, dtype=torch.long, device=chosen.device)
    row = b.repeat_interleave(count).view_as(first), h.repeat(batch).view_as(first)
    pairs = Pairs(*row, first, chosen.clamp_min(0).flatten(0, 1).unsqueeze(1))
    tiles = (x.flatten(0, 1) for x in (scores, terms.content(heads.q), k))
    scores = terms.scores(next(tiles), pairs, *tiles).view_as(scores)
    weights, _ = softmax(scores, (chosen >= 0).unsqueeze(2))
    more = terms.values(weights.flatten(0, 1), pairs)
    return weights @ v if more is None else weights @ v + more.view_as(heads.q)
