"""Exact search for the keys with the largest products with each query.

    q [H, R, D], keys [H, N, D]  ->  products [H, R, k] and places [H, R, k] of the k largest, largest first

    plain    all R x N products at once: the definition
    tiled    the same, with at most a tile of products in memory
    faiss    the same by faiss.knn, in float32

k is `count`, or N if there are fewer keys. Products are at least in float32. Among equal products the choice
is arbitrary.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from polyformer.core.imports import needs_extra
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.batched_products import product

Search = Literal["tiled", "plain", "faiss"]
Matches = tuple[Tensor, Tensor]

TILE_QUERIES, TILE_KEYS = 128, 32768
"""The size of a tile of products, 16 MiB. Wide tiles need fewer groups in total."""

SMALLEST_GROUP = 4
"""The smallest group size that saves time; smaller groups have nearly as much to search as all products."""


def search_plain(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the largest of all products."""
    q, keys = at_least_float32(q), at_least_float32(keys)
    return _values_and_indices((q @ keys.mT).topk(min(count, keys.shape[1])))


def search_tiled(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the largest products, computed in tiles of the keys and merged with the largest so far."""
    heads, queries, number = *q.shape[:2], keys.shape[1]
    # All products fit into one tile.
    if heads * queries * number <= TILE_QUERIES * TILE_KEYS:
        scores, places = _topk(product(at_least_float32(q), at_least_float32(keys).mT).flatten(0, 1), count)
        return scores.unflatten(0, (heads, queries)), places.unflatten(0, (heads, queries))
    tiles = [
        [_topk_tiled(some, keys[head], count) for some in q[head].split(TILE_QUERIES)]
        for head in range(heads)
    ]
    scores, places = (torch.stack([torch.cat([pair[i] for pair in row]) for row in tiles]) for i in range(2))
    return scores, places


def _topk_tiled(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the largest products of a head: q [R, D], keys [N, D] -> [R, k] each."""
    q, number = at_least_float32(q), len(keys)
    scores, places = q.new_empty(len(q), 0), torch.empty(len(q), 0, dtype=torch.long, device=q.device)
    for start in range(0, number, TILE_KEYS):
        tile = at_least_float32(keys[start : start + TILE_KEYS])
        new, columns = _topk(product(q.unsqueeze(0), tile.T.unsqueeze(0)).squeeze(0), count)
        scores, places = torch.cat([scores, new], 1), torch.cat([places, columns + start], 1)
        # The k largest of all tiles so far: [R, k + k] -> [R, k].
        scores, order = scores.topk(min(count, scores.shape[1]))
        places = places.gather(1, order)
    return scores, places


def _topk(scores: Tensor, count: int) -> Matches:
    """Return the largest of scores [R, W], [R, k] each.

    Each of the k largest elements is in one of the k groups with the largest maxima (otherwise k other
    elements would be at least as large). Only these groups are searched: W / size maxima and k size members.
    """
    rows, width = scores.shape
    size = math.isqrt(width // count)
    if size < SMALLEST_GROUP:
        return _values_and_indices(scores.topk(min(count, width)))
    groups = width // size
    full_groups = groups * size
    members = scores[:, :full_groups].view(rows, size, groups)  # groups of columns `groups` apart
    # Groups are strided, so that maxima of neighbouring groups are computed together as vectors.
    best = members.amax(1).topk(count, sorted=False).indices
    columns = best.unsqueeze(1) + groups * torch.arange(size, device=scores.device).unsqueeze(1)
    columns = columns.flatten(1)
    if full_groups < width:
        rest = torch.arange(full_groups, width, device=scores.device).expand(rows, -1)
        columns = torch.cat([columns, rest], 1)
    largest, order = scores.gather(1, columns).topk(count)
    return largest, columns.gather(1, order)


def search_faiss(q: Tensor, keys: Tensor, count: int) -> Matches:
    """Return the result of faiss.knn for every head, on the CPU."""
    faiss = _faiss()
    heads = zip(*(x.float().cpu().contiguous().numpy() for x in (q, keys)))
    best = [faiss.knn(*pair, min(count, keys.shape[1]), metric=faiss.METRIC_INNER_PRODUCT) for pair in heads]
    scores, places = (torch.stack([torch.from_numpy(pair[i]) for pair in best]) for i in range(2))
    return scores.to(q.device, at_least_float32(q[:0]).dtype), places.to(q.device)


def gather_entries(vectors: Tensor, places: Tensor) -> Tensor:
    """Return the vectors [H, N, D] at places [H, R, k]: [H, R, k, D]."""
    near = [own.index_select(0, some.flatten()) for own, some in zip(vectors, places)]
    return torch.stack(near).unflatten(1, places.shape[1:])


def _faiss() -> Any:
    """Return the module; raises `InputError` with the way to install it."""
    with needs_extra("datastore", "memory.search: faiss is not installed", "or take search='tiled'"):
        import faiss
    return faiss


def _values_and_indices(best: torch.return_types.topk) -> Matches:
    return best.values, best.indices


SEARCHES: dict[str, Callable[[Tensor, Tensor, int], Matches]] = {
    "tiled": search_tiled,
    "plain": search_plain,
    "faiss": search_faiss,
}
