"""Who takes part in `bench attention`: our patterns, torch's dense attention, public peers if installed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention import Window
from polyformer.core.attend import attend
from polyformer.core.context import Context
from polyformer.core.errors import InputError
from polyformer.core.pattern import Pattern

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class AbsentError(Exception):
    """A contender that cannot take part here, and why."""


@dataclasses.dataclass(frozen=True)
class Contest:
    """One contender on one shape: `peer` is a name of `PEERS`, or None for ours; `pattern` an expression."""

    pattern: str
    peer: str | None
    length: int
    batch: int
    heads: int
    width: int
    backward: bool
    device: str
    dtype: str

    @property
    def label(self) -> str:
        """What tables and plots call it."""
        if self.peer is None:
            return self.pattern
        return self.peer if self.peer in DENSE else f"{self.peer} {self.pattern}"


def call(contest: Contest) -> Callable[[], object]:
    """The call to measure, its inputs made and everything it needs prepared.

    Raises `AbsentError` where it cannot be made.
    """
    dtype, device = getattr(torch, contest.dtype), torch.device(contest.device)
    generator = torch.Generator(device).manual_seed(0)
    shape = contest.batch, contest.heads, contest.length, contest.width
    q, k, v, grad = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(4))
    inputs = [x.requires_grad_(contest.backward) for x in (q, k, v)]
    pattern = Pattern.from_text(contest.pattern)
    attention = _ours(pattern) if contest.peer is None else PEERS[contest.peer](pattern, contest)

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    def both() -> None:
        for x in inputs:
            x.grad = None
        attention(*inputs).backward(grad)

    return both if contest.backward else forward


def _ours(pattern: Pattern) -> Attention:
    return lambda q, k, v: attend(q, k, v, pattern=pattern)


def _sdpa(pattern: Pattern, contest: Contest) -> Attention:
    """torch's fused kernel over every key."""
    return F.scaled_dot_product_attention


def _unfused(pattern: Pattern, contest: Contest) -> Attention:
    """The equation over every key, one operation after the other."""
    scale = contest.width**-0.5
    return lambda q, k, v: torch.softmax(q @ k.mT * scale, -1) @ v


def _local_attention(pattern: Pattern, contest: Contest) -> Attention:
    """`local-attention` with windows as wide as ours; it sees whole blocks, so some keys more than we do."""
    if not isinstance(pattern, Window) or pattern.dilation > 1 or pattern.after not in (0, pattern.before):
        raise AbsentError(f"it has no counterpart of {contest.pattern}")
    try:
        from local_attention import LocalAttention
    except ImportError:
        raise AbsentError("not installed (pip install 'polyformer[peers]')") from None
    return LocalAttention(
        dim=contest.width, window_size=pattern.before, causal=pattern.after == 0, look_backward=1,
        look_forward=0 if pattern.after == 0 else 1, autopad=True, use_rotary_pos_emb=False,
    )  # fmt: skip


def _flex(pattern: Pattern, contest: Contest) -> Attention:
    """FlexAttention as its documentation says: compiled, with a BlockMask from the mask itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = torch.device(contest.device)
    if contest.backward and device.type == "cpu":
        raise AbsentError("FlexAttention has no backward on a CPU")
    context = Context(contest.length, contest.length)
    # Compiled, as the mask of a long input would not fit otherwise.
    make: Any = torch.compile(create_block_mask)
    mask = make(pattern.mask_mod(context), None, None, contest.length, contest.length, device=contest.device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


PEERS: dict[str, Callable[[Pattern, Contest], Attention]] = {
    "sdpa": _sdpa,
    "unfused": _unfused,
    "local-attention": _local_attention,
    "flex": _flex,
}
DENSE = "sdpa", "unfused"
"""Peers that look at every key whatever the pattern: one line each, and not at great lengths."""


def check_pattern(text: str) -> None:
    """Raises `InputError` unless `text` is a pattern that needs no documents or padding to mean something."""
    if not isinstance(text, str):
        raise InputError(f"patterns: expected expressions such as 'Window(256)', got {text!r}")
    Pattern.from_text(text)
