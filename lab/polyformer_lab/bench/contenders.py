"""The contenders of `bench attention`: our members, torch's dense attention, and installed public peers."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from polyformer.attention.patterns import Causal
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.core.sequence.context import Context
from polyformer_lab.bench import peers
from polyformer_lab.bench.member import Alone, Attention, BenchmarkCase
from polyformer_lab.bench.rows import AbsentError

DENSE = "sdpa", "unfused"
"""Peers that compute attention over every key for any member."""


def call(case: BenchmarkCase) -> Callable[[], object]:
    """Return the call to measure, after its inputs and all preparations are made.

    The inputs have the memory layout of a model's projections, [B, T, H, D].

    Raises `AbsentError` if the contender cannot take part.
    """
    generator = torch.Generator(case.device).manual_seed(0)
    shape = case.batch, case.length, case.heads, case.width
    q, k, v, grad = (torch.randn(shape, **case.place, generator=generator).transpose(1, 2) for _ in range(4))
    inputs = [x.requires_grad_(case.backward) for x in (q, k, v)]
    attention = _ours(case) if case.peer is None else PEERS[case.peer](case)

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def both() -> None:
        for x in inputs:
            x.grad = None
        attention(*inputs).backward(grad)

    return both if case.backward else forward


def _ours(case: BenchmarkCase) -> Attention:
    return case.placed(Alone(case.member, case.length, case.heads, case.width, case.causal))


def _sdpa(case: BenchmarkCase) -> Attention:
    """Return torch's fused kernel over every key."""
    return functools.partial(F.scaled_dot_product_attention, is_causal=case.causal)


def _unfused(case: BenchmarkCase) -> Attention:
    """Return attention over every key by its equation, without fusion."""
    scale, shape = case.width**-0.5, (case.length, case.length)
    if not case.causal:
        return lambda q, k, v: torch.softmax(q @ k.mT * scale, -1) @ v
    future = torch.ones(shape, dtype=torch.bool, device=case.device).triu(1)
    return lambda q, k, v: torch.softmax((q @ k.mT * scale).masked_fill(future, -math.inf), -1) @ v


def _flex(case: BenchmarkCase) -> Attention:
    """Return FlexAttention as in its documentation: compiled, with a BlockMask from the mask itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, pattern = torch.device(case.device), case.member.pattern
    if pattern is None or case.member.position is not None:
        raise case.no_counterpart()
    if case.backward and device.type == "cpu":
        raise AbsentError("FlexAttention has no backward on a CPU")
    context = Context(case.length, case.length)
    seen = (pattern & Causal() if case.causal else pattern).mask_mod(context)
    prepare_inductor()
    # Compiled, since otherwise the mask of a long input would not fit into memory.
    make: Any = torch.compile(create_block_mask)
    mask = make(seen, None, None, case.length, case.length, device=case.device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


PEERS: dict[str, Callable[[BenchmarkCase], Attention]] = {
    "sdpa": _sdpa,
    "unfused": _unfused,
    "local-attention": peers.local_attention,
    "longformer": peers.longformer,
    "bigbird": peers.bigbird,
    "x-transformers": peers.x_transformers,
    "linformer": peers.linformer,
    "performer-pytorch": peers.performer_pytorch,
    "reformer-pytorch": peers.reformer_pytorch,
    "routing-transformer": peers.routing_transformer,
    "flex": _flex,
}
