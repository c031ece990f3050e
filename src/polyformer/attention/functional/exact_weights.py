"""The exact weights of one call of `attend`, tile by tile of queries, without a tensor of all pairs."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.layout import unite
from polyformer.attention.patterns.score_steps import steps_of
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.softmax import softmax

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
