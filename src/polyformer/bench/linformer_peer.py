"""The public package `linformer` in `bench attention`: without projections, on the inputs that ours gets."""

import torch
from torch import Tensor, nn

from polyformer.attention import LinformerConfig
from polyformer.bench.contest import Attention, Contest
from polyformer.bench.peers import MISSING, Given


def linformer(contest: Contest) -> Attention:
    """`linformer(k=K, max_length=N)`: an E and an F for all heads; no masks, pools or other sharing."""
    config = contest.member.mechanism
    if not isinstance(config, LinformerConfig) or contest.causal or contest.member.position is not None:
        raise contest.no_counterpart()
    if not isinstance(config.k, int) or config.sharing != "head" or config.projection != "linear":
        raise contest.no_counterpart("it has one k, sharing 'head' and linear projections alone")
    return PublicLinformer(contest, config, config.k)


class PublicLinformer(nn.Module):
    """`LinformerSelfAttention` with q, k and v in the place of what it would project."""

    def __init__(self, contest: Contest, config: LinformerConfig, k: int):
        super().__init__()
        try:
            from linformer import LinformerSelfAttention
        except ImportError:
            raise MISSING from None
        width = contest.heads * contest.width
        layer = LinformerSelfAttention(width, config.max_length, k=k, heads=contest.heads)
        self.given = [Given() for _ in range(3)]
        for name, part in zip(("to_q", "to_k", "to_v", "to_out"), (*self.given, nn.Identity())):
            setattr(layer, name, part)
        self.layer = layer.to(contest.device, getattr(torch, contest.dtype)).train(contest.backward)
        self.heads = contest.heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for part, x in zip(self.given, (q, k, v)):
            part.value = x.transpose(1, 2).flatten(2)
        return self.layer(self.given[0].value).unflatten(2, (self.heads, -1)).transpose(1, 2)
