"""Position schemes as their papers write them, a pair of tokens at a time, and attention in loops."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.patterns import Pattern
from polyformer.patterns.implied import implied
from polyformer.position import Site
from polyformer.sequence.context import Context

SITE = [Site(layer, lambda x: x, lambda x: x) for layer in range(3)]
"""Layers for schemes that need no projections of theirs."""


class Naive:
    """One scheme: `score` of a query and a key at positions i and j, and the vector that joins a value."""

    def __init__(self, position: Any, layer: int):
        self.position, self.layer = position, layer

    def score(self, h: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return q @ k / math.sqrt(len(q))

    def value(self, h: int, v: Tensor, i: int, j: int) -> Tensor:
        return v


class NaiveRope(Naive):
    """Every pair of channels times its 2 x 2 rotation."""

    def turned(self, x: Tensor, pos: int) -> Tensor:
        config, width = self.position.config, int(len(x) * self.position.config.fraction)
        out = x.clone()
        for m in range(width // 2):
            angle = pos * config.base ** (-2 * m / width)
            pair = [m, m + width // 2] if config.layout == "halves" else [2 * m, 2 * m + 1]
            turn = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            out = out.index_copy(0, torch.tensor(pair), torch.tensor(turn, dtype=x.dtype) @ x[pair])
        return out

    def score(self, h: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return super().score(h, self.turned(q, i), self.turned(k, j), i, j)


class NaiveShaw(Naive):
    """Equations 3 to 5 of Shaw et al. 2018."""

    def entry(self, i: int, j: int) -> int:
        clip = self.position.clip
        return max(-clip, min(clip, j - i)) + clip

    def score(self, h: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return super().score(h, q, k + self.position.keys[self.layer].weight[self.entry(i, j)], i, j)

    def value(self, h: int, v: Tensor, i: int, j: int) -> Tensor:
        if not self.position.values:
            return v
        return v + self.position.values[self.layer].weight[self.entry(i, j)]


class NaiveTransformerXL(Naive):
    """The four terms (a) to (d) of Dai et al. 2019, section 3.3."""

    def score(self, h: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        width, limit = self.position.hidden_size, self.position.config.clamp_distance
        distance = i - j if limit is None else max(-limit, min(limit, i - j))
        waves = [
            (math.cos if c % 2 else math.sin)(distance / 10000 ** (2 * (c // 2) / width))
            for c in range(width)
        ]
        key = (self.position.projections[self.layer].weight @ torch.tensor(waves, dtype=q.dtype)).view(
            -1, len(q)
        )[h]
        own = 0 if self.position.config.shared_biases else self.layer
        u, v = self.position.u[own, h, 0], self.position.v[own, h, 0]
        return (q @ k + q @ key + u @ k + v @ key) / math.sqrt(len(q))


class NaiveDistanceAware(Naive):
    """The function f of the paper as it stands there."""

    def score(self, h: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        w, b = self.position.w[self.layer, h], self.position.b[self.layer, h]
        factor = (1 + b.exp()) / (1 + (b - w * abs(i - j)).exp())
        return (q @ k).relu() * factor / math.sqrt(len(q))


def attention(
    naive: Naive, q: Tensor, k: Tensor, v: Tensor, context: Context, pattern: Pattern | None
) -> Tensor:
    """softmax over the keys that pattern and context allow, pair by pair, by positions and not by slots."""
    rows, heads, queries, _ = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    keys = k.shape[2]
    allowed = torch.ones(rows, heads, queries, keys, dtype=torch.bool)
    index = (
        torch.arange(rows).view(-1, 1, 1, 1),
        torch.arange(heads).view(1, -1, 1, 1),
        torch.arange(queries).view(-1, 1),
        torch.arange(keys),
    )
    for one in (pattern, implied(context)):
        if one is not None:
            allowed = allowed & one.mask(context, *index)
    q_pos = context.query_position(index[0].view(-1, 1), index[2].view(1, -1)).expand(rows, -1).tolist()
    k_pos = context.key_position(index[0].view(-1, 1), index[3].view(1, -1)).expand(rows, -1).tolist()
    out = torch.zeros(rows, heads, queries, v.shape[3], dtype=q.dtype)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in (rows, heads, queries))).tolist():
        seen = allowed[b, h, i].nonzero().flatten().tolist()
        if seen:
            scores = [naive.score(h, q[b, h, i], k[b, h, j], q_pos[b][i], k_pos[b][j]) for j in seen]
            values = [naive.value(h, v[b, h, j], q_pos[b][i], k_pos[b][j]) for j in seen]
            out = out.index_put(
                (torch.tensor(b), torch.tensor(h), torch.tensor(i)),
                torch.stack(scores).softmax(0) @ torch.stack(values),
            )
    return out


def randomised(position: nn.Module) -> Any:
    """The module in float64, all parameters away from their initial values."""
    position = position.double()
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return position
