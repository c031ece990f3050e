"""The weights of one call: of `attend`, tile by tile of queries without masked pairs; or of any mechanism."""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import unite
from polyformer.attention.patterns.score_steps import steps_of
from polyformer.core.ops.precision import at_least_float32
from polyformer.core.ops.softmax import softmax

TILE = 128
"""The number of queries that are computed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
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


@torch.no_grad()
def tiles(request: Request) -> Iterator[Tile]:
    """Yield all queries, in order, with

    weights = softmax(score_mod(q k^T scale + relative terms)) over the keys that the pattern allows.

    Scores have the precision of queries and keys, and at least float32.
    """
    q = at_least_float32(request.q[:1])
    k = at_least_float32(request.k[:1].repeat_interleave(request.groups, 1))
    context, heads = request.context, q.shape[1]
    relative = request.relative and request.relative.score_mod(q, k, request.scale, context)
    b = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=q.device)
    h = torch.arange(heads, device=q.device).view(1, -1, 1, 1)
    for start in range(0, context.q_len, TILE):
        stop = min(start + TILE, context.q_len)
        columns = _columns(request, start, stop, heads).to(q.device)
        q_idx = torch.arange(start, stop, device=q.device).view(-1, 1)
        scores = (q[:, :, start:stop] @ k[:, :, columns].mT) * request.scale
        if relative is not None:
            scores = relative(scores, b, h, q_idx, columns)
        changes = []
        for _, mod in steps_of(request.score_mod):
            before, scores = scores, mod(scores, b, h, q_idx, columns).expand_as(scores)
            changes.append((scores - before).masked_fill(before.isneginf(), 0.0)[0].float())
        allowed = _allowed(request, heads, b, q_idx, columns)
        weights, lse = softmax(scores[0], allowed)
        yield Tile(start, stop, columns, weights.float(), allowed, lse.float(), tuple(changes))


def with_sink(ordinary: Iterator[Tile], sink: Tensor) -> Iterator[Tile]:
    """Yield the tiles with the share `sink` [H, Tq], float32, of each query's weights taken off the keys."""
    for tile in ordinary:
        keys = 1 - sink[:, tile.start : tile.stop].to(tile.weights.device)
        weights, lse = tile.weights * keys.unsqueeze(2), tile.lse - keys.log()
        yield dataclasses.replace(tile, weights=weights, lse=lse)


def with_rows(ordinary: Iterator[Tile], rows: Tensor, others: Iterator[Tile]) -> Iterator[Tile]:
    """Yield the tiles of all queries, with the queries `rows` [G] replaced by `others`; all on the CPU."""
    parts = list(others)
    for tile in ordinary:
        inside = (rows >= tile.start) & (rows < tile.stop)
        if not inside.any():
            yield tile
            continue
        keys = max(int(part.columns.max()) + 1 for part in (*parts, tile) if len(part.columns))
        whole = _over(tile, keys)
        for part in parts:
            mine = inside[part.start : part.stop].nonzero().flatten()
            places, own = rows[part.start : part.stop][mine] - tile.start, _over(part, keys)
            for table, values in zip(whole, own):
                table[:, places] = values[:, mine]
        weights, allowed, lse = whole
        yield Tile(tile.start, tile.stop, torch.arange(keys), weights, allowed, lse)


def _over(tile: Tile, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return copies of weights and allowed pairs [H, T, keys] over all keys, and of the log-sum-exps."""
    heads, queries, _ = tile.weights.shape
    weights, allowed = torch.zeros(heads, queries, keys), torch.zeros(heads, queries, keys, dtype=torch.bool)
    columns = tile.columns.cpu()
    weights[:, :, columns] = tile.weights.cpu()
    allowed[:, :, columns] = tile.allowed.expand(heads, -1, -1).cpu()
    return weights, allowed, tile.lse.cpu().clone()


def _columns(request: Request, start: int, stop: int, heads: int) -> Tensor:
    """Return the key slots that some head's query in the range may see."""
    if request.pattern is None:
        return torch.arange(request.context.kv_len)
    patterns = {request.pattern.head_pattern(head) for head in range(heads)}
    needed = unite(
        interval for pattern in patterns for interval in pattern.keys(request.context, start, stop).some
    )
    return torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in needed)])


def _allowed(request: Request, heads: int, b: Tensor, q_idx: Tensor, columns: Tensor) -> Tensor:
    """Return the attended pairs, [H or 1, Tq, K]; a single head if all heads are equal."""
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


Mix = Callable[[Tensor], Tensor]
"""A function from values [1, Hkv, Tk, D] to outputs [1, H, Tq, D]."""


@torch.no_grad()
def value_matrix(mix: Mix, values: Tensor) -> Tensor:
    """Return the attention matrix A [H, Tq, Tk] of any mechanism, float32: its map from values to outputs.

        y = A v + c,  c = f(q, k, 0),  so  f(q, k, I) - c = A

    for every mechanism is affine in its values, for any function of queries and keys: hashing, clusters,
    random features, compressed keys. The columns of the identity are evaluated in groups of D. `values`
    [1, Hkv, Tk, D] determine shape and type.
    """
    length, width = values.shape[-2:]
    nothing = mix(torch.zeros_like(values))
    columns = []
    for start in range(0, length, width):
        part = torch.zeros_like(values)
        index = torch.arange(start, min(start + width, length), device=values.device)
        part[..., index, index - start] = 1
        columns.append((mix(part) - nothing)[0, ..., : len(index)])
    return torch.cat(columns, -1).float()
