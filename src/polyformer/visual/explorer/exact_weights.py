"""The weights of one call of `attend`, a tile of queries at a time: what is never seen is never computed."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from polyformer.dot_product.request import Request
from polyformer.ops.softmax import softmax
from polyformer.patterns.base import Pattern
from polyformer.patterns.layout import unite

TILE = 128
"""Queries computed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """The queries start <= i < stop of the first batch row, and all keys that any of them sees.

    columns: [K] key slots; weights: [H, stop - start, K], float32; allowed: [H or 1, stop - start, K] bool;
    lse: [H, stop - start], the log-sum-exp of the scores.
    """

    start: int
    stop: int
    columns: Tensor
    weights: Tensor
    allowed: Tensor
    lse: Tensor


@torch.no_grad()
def tiles(request: Request) -> Iterator[Tile]:
    """All queries, in order, with

    weights = softmax(score_mod(q k^T scale + relative terms)) over the keys that the pattern allows.
    """
    q, k = request.q[:1].float(), request.k[:1].repeat_interleave(request.groups, 1).float()
    context, mod = request.context, request.whole_score_mod(request.context)
    heads = q.shape[1]
    b = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=q.device)
    h = torch.arange(heads, device=q.device).view(1, -1, 1, 1)
    for start in range(0, context.q_len, TILE):
        stop = min(start + TILE, context.q_len)
        columns = _columns(request, start, stop, heads).to(q.device)
        q_idx = torch.arange(start, stop, device=q.device).view(-1, 1)
        scores = (q[:, :, start:stop] @ k[:, :, columns].mT) * request.scale
        if mod is not None:
            scores = mod(scores, b, h, q_idx, columns)
        allowed = _allowed(request, heads, b, q_idx, columns)
        weights, lse = softmax(scores[0], allowed)
        yield Tile(start, stop, columns, weights, allowed, lse)


def _columns(request: Request, start: int, stop: int, heads: int) -> Tensor:
    """The key slots that some head's query in the run may see."""
    if request.pattern is None:
        return torch.arange(request.context.kv_len)
    patterns = {request.pattern.head_pattern(head) for head in range(heads)}
    needed = unite(
        interval for pattern in patterns for interval in pattern.keys(request.context, start, stop).some
    )
    return torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in needed)])


def _allowed(request: Request, heads: int, b: Tensor, q_idx: Tensor, columns: Tensor) -> Tensor:
    """Who sees whom, [H or 1, Tq, K]; one for all heads where they do not differ."""
    shape = len(q_idx), len(columns)
    if request.pattern is None:
        return torch.ones(1, *shape, dtype=torch.bool, device=columns.device)
    groups: dict[Pattern, list[int]] = {}
    for head in range(heads):
        groups.setdefault(request.pattern.head_pattern(head), []).append(head)
    allowed = torch.empty(heads, *shape, dtype=torch.bool, device=columns.device)
    for pattern, members in groups.items():
        h = torch.tensor(members, device=columns.device)
        mask = pattern.mask(request.context, b, h.view(1, -1, 1, 1), q_idx, columns)
        allowed[h] = mask.expand(1, len(members), *shape)[0]
    return allowed[:1] if bool((allowed == allowed[:1]).all()) else allowed
