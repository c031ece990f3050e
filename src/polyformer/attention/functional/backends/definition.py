"""Attention directly from its equation: the reference in the tests of every other backend.

    score_ij = score_mod(q_i . k_j * scale + relative terms)        allowed_ij: whether i may see j
    y_i      = sum_j weight_ij (v_j + position_values[d])           weight_i = softmax of the allowed scores

float16 and bfloat16 inputs are computed in float32, as in the fused kernels.

`DensePairs` has a tensor of all pairs, before any rule makes weights of the scores. `ExactWeights` computes
softmax weights tile by tile of queries, for readers who look at them.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Request, indices
from polyformer.attention.patterns.layout import unite
from polyformer.attention.patterns.score_steps import steps_of
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.layers import dropout
from polyformer.core.ops.softmax import softmax


@dataclasses.dataclass(frozen=True, eq=False)
class DensePairs:
    """All pairs of a call; time and memory are Tq x Tk.

    scores: [B, H, Tq, Tk]. allowed: bool, broadcasts to `scores`; None if every query sees every key. values:
    [B, H, Tk, Dv].
    """

    request: Request
    scores: Tensor
    allowed: Tensor | None
    values: Tensor
    relative: Relative | None

    @classmethod
    def of(cls, request: Request) -> "DensePairs":
        """Return the pairs of a request."""
        half = request.q.dtype in (torch.float16, torch.bfloat16)
        q, k, v = (x.float() if half else x for x in (request.q, request.k, request.v))
        # Grouped queries: `groups` neighbouring query heads share a key head.
        k, v = (x.repeat_interleave(request.groups, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * request.scale  # [B, H, Tq, Tk]
        b, h, q_idx, kv_idx = indices(request)
        relative = None if request.relative is None else request.relative.to(q.dtype)
        if relative is not None:
            add = relative.score_mod(q, k, request.scale, request.context)
            scores = add(scores, b, h, q_idx, kv_idx)
        if request.score_mod is not None:
            scores = request.score_mod(scores, b, h, q_idx, kv_idx).expand(scores.shape)
        # The mask is separate, so that no score_mod can make a masked pair visible.
        allowed = None
        if request.pattern is not None:
            allowed = request.pattern.mask(request.context, b, h, q_idx, kv_idx)
        return cls(request, scores, allowed, v, relative)

    def mix(self, weights: Tensor) -> Tensor:
        """Return the values [B, H, Tq, Dv] of every query, for weights [B, H, Tq, Tk]."""
        out = weights @ self.values
        if self.relative is not None and self.relative.position_values is not None:
            out = out + self.relative.values_term(weights, self.request.context)
        return out.to(self.request.q.dtype)


TILE = 128
"""The number of queries that are computed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightTile:
    """The queries start <= i < stop of the first batch row, and all keys that any of them sees.

    columns: [K] key slots; weights: [H, stop - start, K], float32; allowed: [H or 1, stop - start, K] bool;
    lse: [H, stop - start], the log-sum-exp of the scores. changes: [H, stop - start, K] for each step of the
    request's `score_mod`, the difference between its output and input scores.
    """

    start: int
    stop: int
    columns: Tensor
    weights: Tensor
    allowed: Tensor
    lse: Tensor
    changes: tuple[Tensor, ...] = ()


class ExactWeights:
    """The weights of one call, for any range of its queries.

    weights = softmax(score_mod(q k^T scale + relative terms)) over the keys that the pattern allows.

    Scores have the precision of queries and keys, and at least float32.
    """

    @torch.no_grad()
    def __init__(self, request: Request):
        self.request = request
        self.q = at_least_float32(request.q[:1])
        self.k = at_least_float32(request.k[:1].repeat_interleave(request.groups, 1))
        relative = request.relative
        self.relative = relative and relative.score_mod(self.q, self.k, request.scale, request.context)

    @torch.no_grad()
    def tile(self, start: int, stop: int) -> WeightTile:
        """Return the weights of the queries start <= i < stop."""
        request, heads, device = self.request, self.q.shape[1], self.q.device
        b = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        h = torch.arange(heads, device=device).view(1, -1, 1, 1)
        columns = _columns(request, start, stop, heads).to(device)
        q_idx = torch.arange(start, stop, device=device).view(-1, 1)
        scores = (self.q[:, :, start:stop] @ self.k[:, :, columns].mT) * request.scale
        if self.relative is not None:
            scores = self.relative(scores, b, h, q_idx, columns)
        changes = []
        for _, mod in steps_of(request.score_mod):
            before, scores = scores, mod(scores, b, h, q_idx, columns).expand_as(scores)
            changes.append((scores - before).masked_fill(before.isneginf(), 0.0)[0].float())
        allowed = _allowed(request, heads, b, q_idx, columns)
        weights, lse = softmax(scores[0], allowed)
        return WeightTile(start, stop, columns, weights.float(), allowed, lse.float(), tuple(changes))


def tiles(request: Request) -> Iterator[WeightTile]:
    """Yield the tiles of all queries, in order."""
    weights, length = ExactWeights(request), request.context.q_len
    for start in range(0, length, TILE):
        yield weights.tile(start, min(start + TILE, length))


def _columns(request: Request, start: int, stop: int, heads: int) -> Tensor:
    """Return the key slots that some head's query in the range may see."""
    if request.pattern is None:
        return torch.arange(request.context.kv_len)
    needed = unite(
        interval
        for pattern in request.pattern.heads_by_pattern(heads)
        for interval in pattern.keys(request.context, start, stop).some
    )
    return torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in needed)])


def _allowed(request: Request, heads: int, b: Tensor, q_idx: Tensor, columns: Tensor) -> Tensor:
    """Return the attended pairs, [H or 1, Tq, K]; a single head if all heads are equal."""
    shape = len(q_idx), len(columns)
    if request.pattern is None:
        return torch.ones(1, *shape, dtype=torch.bool, device=columns.device)
    allowed = torch.empty(heads, *shape, dtype=torch.bool, device=columns.device)
    for pattern, members in request.pattern.heads_by_pattern(heads).items():
        h = torch.tensor(members, device=columns.device)
        mask = pattern.mask(request.context, b, h.view(1, -1, 1, 1), q_idx, columns)
        allowed[h] = mask.expand(1, len(members), *shape)[0]
    return allowed[:1] if bool((allowed == allowed[:1]).all()) else allowed


def refuses(request: Request) -> str | None:
    """Return None: this backend runs every request."""
    return None


def run(request: Request) -> tuple[Tensor, Tensor]:
    """Return output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]; time and memory are Tq x Tk."""
    pairs = DensePairs.of(request)
    probabilities, lse = softmax(pairs.scores, pairs.allowed)
    return pairs.mix(dropout(probabilities, request.dropout)), lse
