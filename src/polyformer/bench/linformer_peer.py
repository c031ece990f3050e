"""The public package `linformer` in `bench attention`: without projections, on the inputs that ours gets."""

import torch
from torch import Tensor, nn

from polyformer.attention import LinformerConfig
from polyformer.bench.benchmark_case import Attention, BenchmarkCase
from polyformer.bench.peers import MISSING, FixedOutput


def linformer(case: BenchmarkCase) -> Attention:
    """`linformer(k=K, max_length=N)`: an E and an F for all heads; no masks, pools or other sharing."""
    config = case.member.mechanism
    if not isinstance(config, LinformerConfig) or case.causal or case.member.position is not None:
        raise case.no_counterpart()
    if not isinstance(config.k, int) or config.sharing != "head" or config.projection != "linear":
        raise case.no_counterpart("it has one k, sharing 'head' and linear projections alone")
    return PublicLinformer(case, config, config.k)


class PublicLinformer(nn.Module):
    """`LinformerSelfAttention` with q, k and v in the place of what it would project."""

    def __init__(self, case: BenchmarkCase, config: LinformerConfig, k: int):
        super().__init__()
        try:
            from linformer import LinformerSelfAttention
        except ImportError:
            raise MISSING from None
        width = case.heads * case.width
        layer = LinformerSelfAttention(width, config.max_length, k=k, heads=case.heads)
        self.outputs = [FixedOutput() for _ in range(3)]
        for name, part in zip(("to_q", "to_k", "to_v", "to_out"), (*self.outputs, nn.Identity())):
            setattr(layer, name, part)
        self.layer = layer.to(case.device, getattr(torch, case.dtype)).train(case.backward)
        self.heads = case.heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The package's layer, its projections replaced by the inputs."""
        for part, x in zip(self.outputs, (q, k, v)):
            part.value = x.transpose(1, 2).flatten(2)
        return self.layer(self.outputs[0].value).unflatten(2, (self.heads, -1)).transpose(1, 2)
