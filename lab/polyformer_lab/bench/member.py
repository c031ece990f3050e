"""A member to measure in `bench attention`: a pattern or a mechanism, with a position scheme or without.

Window(256) | Global(1)                     a pattern
Window({sqrt}, 0) | Strided({sqrt})         {sqrt} is the root of each length, rounded
Window(256) + alibi                         with a position scheme
adaptive_span(max_span=512, initial=0.5)    a mechanism and its options
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import (
    BoundPosition,
    Position,
    PositionConfig,
    Shape,
    Site,
)
from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context
from polyformer_lab.bench.rows import AbsentError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function q, k, v [B, H, T, D] -> [B, H, T, D]."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A mechanism, and its position scheme if there is one."""

    mechanism: MechanismConfig
    position: PositionConfig | None = None

    @classmethod
    def read(cls, text: str, length: int) -> Self:
        """Return the member `text` for inputs of `length`; raises `InputError` for anything else."""
        if not isinstance(text, str):
            raise InputError(f"members: expected expressions such as 'Window(256)', got {quote(text)}")
        base, plus, scheme = text.replace("{sqrt}", str(round(math.sqrt(length)))).partition("+")
        mechanism = MechanismConfig.from_dict(base, "members")
        if not plus:
            return cls(mechanism)
        position = PositionConfig.from_dict(scheme, "position scheme")
        if not _acts_on_scores(position.build(Shape(hidden_size=8, num_heads=2, head_size=4))):
            raise InputError(
                f"members: {quote(scheme.strip())} changes a model's input and not its attention"
            )
        mechanism.require("supports_score_bias")
        return cls(mechanism, position)

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of the attended pairs; None for a mechanism without a pattern."""
        return self.mechanism.pattern if isinstance(self.mechanism, SoftmaxConfig) else None


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    """A contender at one shape: `peer` is a name of `contenders.PEERS`, or None for our member `text`."""

    text: str
    peer: str | None
    length: int
    batch: int
    heads: int
    width: int
    backward: bool
    device: str
    dtype: str
    causal: bool = False

    @property
    def member(self) -> Member:
        """The member at this length."""
        return Member.read(self.text, self.length)

    @property
    def place(self) -> dict[str, Any]:
        """The device and the data type of all tensors."""
        return {"device": torch.device(self.device), "dtype": getattr(torch, self.dtype)}

    def placed(self, module: nn.Module) -> nn.Module:
        """Return the module on its device, in training mode if the backward pass is measured."""
        return module.to(**self.place).train(self.backward)

    def no_counterpart(self, why: str = "") -> AbsentError:
        """Return the error of a peer that has no such member."""
        return AbsentError(f"it has no counterpart of {self.text}{f': {why}' if why else ''}")


class Alone(nn.Module):
    """The attention of a member without its projections: q, k, v [B, H, T, D] -> [B, H, T, D]."""

    def __init__(self, member: Member, length: int, heads: int, width: int, causal: bool):
        super().__init__()
        self.mechanism = member.mechanism.build(heads, width)
        self.context = Context(length, length, causal=causal)
        shape = Shape(hidden_size=heads * width, max_positions=length, num_heads=heads, head_size=width)
        self.position: Position | None = None if member.position is None else member.position.build(shape)

        def to_heads(vectors: Tensor) -> Tensor:
            return vectors.unflatten(-1, (heads, width)).transpose(0, 1)

        self.site = Site(0, to_heads, to_heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of one call as in a model's layer, with a newly computed layout."""
        context = dataclasses.replace(self.context, memo={})  # computes layouts again, as for a new batch
        if self.position is None:
            return self.mechanism(q, k, v, context, None, None)[0]
        q, k = self.position.rotate(q, k, context, self.site)
        return self.mechanism(q, k, v, context, None, BoundPosition(self.position, self.site))[0]


def density(pattern: Pattern, length: int, heads: int, causal: bool) -> float:
    """Return the share of all pairs of a query and a key that the pattern allows, over all heads."""
    context = Context(length, length, causal=causal)
    own = [pattern.head_pattern(head) for head in range(heads)]
    pairs = {pattern: _pairs(pattern, context) for pattern in dict.fromkeys(own)}
    return sum(pairs[pattern] for pattern in own) / (heads * length**2)


def _pairs(pattern: Pattern, context: Context) -> int:
    attended, zero = 0, torch.zeros((), dtype=torch.long)
    for row in pattern.layout(context, 128):
        q_idx = torch.arange(row.start, row.stop).view(-1, 1)
        for start, stop in row.keys.some:
            kv_idx = torch.arange(start, stop)
            seen = pattern.mask(context, zero, zero, q_idx, kv_idx)
            if context.causal:
                seen = seen & (kv_idx <= q_idx)
            attended += int(seen.sum())
    return attended


def _acts_on_scores(position: Position) -> bool:
    return position.adds_terms or position.rotates
