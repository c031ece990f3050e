"""Calls on one process, and the same spread over a group of processes, compared."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Pattern
from polyformer.core.sequence.context import Context, SequenceShard, balanced, contiguous
from polyformer.core.sequence.context_parallel import shard_sequence

LENGTH, ROWS, HEADS, KV_HEADS = 45, 2, 4, 2


def share_of(kind: str, length: int, way: str) -> SequenceShard:
    runs = {"contiguous": contiguous, "balanced": balanced}[kind](length, dist.get_world_size())
    return SequenceShard(dist.group.WORLD, dist.get_rank(), runs, way)


def whole_context(length: int, *, causal: bool, mixed: bool) -> Context:
    """Some marked tokens; where `mixed`, documents and segments that end anywhere, padding on both sides."""
    tables: dict[str, Tensor] = {}
    marked = torch.arange(length).expand(ROWS, -1) % 17 == 3
    tables |= {"q_marked": marked, "kv_marked": marked}
    if mixed:
        doc = torch.randint(0, 4, (ROWS, length)).sort().values
        segment = (torch.arange(length) // 7).expand(ROWS, -1)
        tables |= {"q_doc": doc, "kv_doc": doc, "q_segment": segment, "kv_segment": segment}
        valid = torch.ones(ROWS, length, dtype=torch.bool)
        valid[0, :5], valid[1, -9:] = False, False
        tables["kv_valid"] = valid
    return Context(length, length, causal=causal, **tables)


def random_inputs(length: int, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """width: of values."""
    shapes = (HEADS, length, 6), (KV_HEADS, length, 6), (KV_HEADS, length, width)
    q, k, v = (torch.randn(ROWS, *shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def assert_spread_equals_whole(
    share: SequenceShard,
    whole: Context,
    inputs: tuple[Tensor, ...],
    parameters: list[Tensor],
    run: Callable[..., Tensor],
) -> None:
    """Outputs [B, H, T, D] and gradients of inputs [.., T, ..] are those of one process; those of parameters,
    which every process has, add up to them. run(context, *inputs)."""
    local_context = shard_sequence(whole, share, inputs[0].device)
    results = []
    weights = None
    for context, take in ((whole, lambda x: x), (local_context, lambda x: share.take(x, 2))):
        leaves = [take(x).detach().requires_grad_() for x in inputs]
        out = run(context, *leaves)
        if weights is None:
            weights = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape) / out.numel()
        loss = (out * take(weights)).sin().sum()
        grads = torch.autograd.grad(loss, [*leaves, *parameters], materialize_grads=True)
        results.append((out, grads))
    (out, grads), (local_out, local_grads) = results
    torch.testing.assert_close(local_out, share.take(out, 2), rtol=1e-10, atol=1e-10)
    for whole_grad, local_grad in zip(grads[: len(inputs)], local_grads):
        torch.testing.assert_close(local_grad, share.take(whole_grad, 2), rtol=1e-10, atol=1e-10)
    for whole_grad, local_grad in zip(grads[len(inputs) :], local_grads[len(inputs) :]):
        dist.all_reduce(local_grad)
        torch.testing.assert_close(local_grad, whole_grad, rtol=1e-10, atol=1e-10)


def check_pattern(
    pattern: Pattern | None,
    share: SequenceShard,
    whole: Context,
    parameters: tuple[Tensor, ...] = (),
    **options: Any,
) -> None:
    """`attend`, its log-sum-exp too."""

    def run(context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attend(q, k, v, pattern=pattern, context=context, return_lse=True, **options)
        return out + lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)

    assert_spread_equals_whole(share, whole, random_inputs(whole.kv_len), list(parameters), run)
