"""The public package `routing-transformer` in `bench attention`, without projections."""

import torch
from torch import Tensor

from polyformer.attention import RoutingConfig
from polyformer.bench.benchmark_case import AbsentError, Attention, BenchmarkCase


def routing_transformer(case: BenchmarkCase) -> Attention:
    """`routing(local_heads=0)`: its clusters take so many tokens of the whole sequence, from the future too.

    Its queries see the tokens that their cluster took, so that its window is ours, both sides of it.
    """
    config = case.member.mechanism
    if not isinstance(config, RoutingConfig) or config.local_heads != 0:
        raise case.no_counterpart("it has routing(local_heads=0)")
    try:
        from routing_transformer.routing_transformer import KmeansAttention
    except ImportError:
        raise AbsentError("not installed (pip install routing-transformer)") from None
    window = config.window if case.causal else 2 * config.window
    attention = KmeansAttention(
        config.clusters,
        window,
        case.heads,
        case.width,
        causal=case.causal,
        ema_decay=config.decay,
        shared_qk=config.share_queries,
    )
    attention = attention.to(case.device, getattr(torch, case.dtype)).train(case.backward)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)[0]

    # Its first call starts its centroids, by ten rounds of k-means.
    shape = case.batch, case.heads, case.length, case.width
    attend(*torch.randn(3, *shape, dtype=getattr(torch, case.dtype), device=case.device))
    return attend
