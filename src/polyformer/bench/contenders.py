"""Who takes part in `bench attention`: our members, torch's dense attention, public peers if installed."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from polyformer.bench import peers
from polyformer.bench.contest import AbsentError, Attention, Contest
from polyformer.bench.linformer_peer import linformer
from polyformer.bench.member import Alone
from polyformer.bench.reformer_peer import reformer_pytorch
from polyformer.bench.routing_peer import routing_transformer
from polyformer.patterns import Causal
from polyformer.sequence.context import Context


def call(contest: Contest) -> Callable[[], object]:
    """The call to measure, its inputs made and everything it needs prepared.

    The inputs lie in memory as a model's projections leave them, [B, T, H, D].

    Raises `AbsentError` where it cannot be made.
    """
    dtype, device = getattr(torch, contest.dtype), torch.device(contest.device)
    generator = torch.Generator(device).manual_seed(0)
    shape = contest.batch, contest.length, contest.heads, contest.width
    q, k, v, grad = (
        torch.randn(shape, dtype=dtype, device=device, generator=generator).transpose(1, 2) for _ in range(4)
    )
    inputs = [x.requires_grad_(contest.backward) for x in (q, k, v)]
    attention = _ours(contest) if contest.peer is None else PEERS[contest.peer](contest)

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def both() -> None:
        for x in inputs:
            x.grad = None
        attention(*inputs).backward(grad)

    return both if contest.backward else forward


def _ours(contest: Contest) -> Attention:
    alone = Alone(contest.member, contest.length, contest.heads, contest.width, contest.causal)
    return alone.to(contest.device, getattr(torch, contest.dtype)).train(contest.backward)


def _sdpa(contest: Contest) -> Attention:
    """torch's fused kernel over every key."""
    return functools.partial(F.scaled_dot_product_attention, is_causal=contest.causal)


def _unfused(contest: Contest) -> Attention:
    """The equation over every key, one operation after the other."""
    scale, shape = contest.width**-0.5, (contest.length, contest.length)
    if not contest.causal:
        return lambda q, k, v: torch.softmax(q @ k.mT * scale, -1) @ v
    future = torch.ones(shape, dtype=torch.bool, device=contest.device).triu(1)
    return lambda q, k, v: torch.softmax((q @ k.mT * scale).masked_fill(future, -math.inf), -1) @ v


def _flex(contest: Contest) -> Attention:
    """FlexAttention as its documentation says: compiled, with a BlockMask from the mask itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, pattern = torch.device(contest.device), contest.member.pattern
    if pattern is None or contest.member.position is not None:
        raise contest.no_counterpart()
    if contest.backward and device.type == "cpu":
        raise AbsentError("FlexAttention has no backward on a CPU")
    context = Context(contest.length, contest.length)
    seen = (pattern & Causal() if contest.causal else pattern).mask_mod(context)
    # Compiled, as the mask of a long input would not fit otherwise.
    make: Any = torch.compile(create_block_mask)
    mask = make(seen, None, None, contest.length, contest.length, device=contest.device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


PEERS: dict[str, Callable[[Contest], Attention]] = {
    "sdpa": _sdpa,
    "unfused": _unfused,
    "local-attention": peers.local_attention,
    "longformer": peers.longformer,
    "bigbird": peers.bigbird,
    "x-transformers": peers.x_transformers,
    "linformer": linformer,
    "performer-pytorch": peers.performer_pytorch,
    "reformer-pytorch": reformer_pytorch,
    "routing-transformer": routing_transformer,
    "flex": _flex,
}
