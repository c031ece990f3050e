"""Routing attention of one causal query a row: only the keys that it attends to are read, beside the
clusters."""

import torch
from torch import Tensor

from polyformer.attention.routing.definition import RoutedHeads, same_cluster, slots
from polyformer.ops.softmax import softmax
from polyformer.sequence.context import Context


def single_query(heads: RoutedHeads, context: Context, window: int, share_queries: bool) -> Tensor:
    """Output [B, H, 1, Dv]."""
    same = same_cluster(heads, context).squeeze(2)
    (own,), slot = slots(context, same.device)
    chosen = torch.where(same & (slot <= own), slot, -1)
    chosen = chosen.topk(min(window, context.kv_len), dim=-1).values  # [B, H, W]
    if share_queries:
        others = (chosen >= 0).sum(-1, keepdim=True) > 1
        chosen = chosen.masked_fill((chosen == own) & others, -1)
    place = chosen.clamp_min(0).unsqueeze(-1)
    k, v = (x.gather(2, place.expand(-1, -1, -1, x.shape[3])) for x in (heads.k, heads.v))
    weights, _ = softmax(heads.q @ k.mT * heads.scale, (chosen >= 0).unsqueeze(2))
    return weights @ v
