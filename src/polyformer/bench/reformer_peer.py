"""The public package `reformer-pytorch` in `bench attention`, without projections."""

import torch
from torch import Tensor

from polyformer.attention import LSHConfig
from polyformer.bench.benchmark_case import AbsentError, Attention, BenchmarkCase


def reformer_pytorch(case: BenchmarkCase) -> Attention:
    """`lsh`: chunks of `window` sorted tokens and the chunk before, as many buckets as chunks.

    Its queries are its keys. As it stands it counts keys seen in several rounds each time, which is its
    faster form, and draws new hashes at every call.
    """
    config = case.member.mechanism
    if not isinstance(config, LSHConfig):
        raise case.no_counterpart("it has lsh")
    if case.length % (2 * config.window):
        raise case.no_counterpart(f"its length is a multiple of {2 * config.window}")
    try:
        from reformer_pytorch.reformer_pytorch import LSHAttention
    except ImportError:
        raise AbsentError("not installed (pip install reformer-pytorch)") from None
    attention = LSHAttention(bucket_size=config.window, n_hashes=config.rounds, causal=case.causal)
    attention = attention.to(case.device, getattr(torch, case.dtype)).train(case.backward)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v)

    return attend
