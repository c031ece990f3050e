"""The exact nearest keys, looked for among all of them, in tiles of the mapped file."""

import numpy as np
import torch
from torch import Tensor

TILE = 1 << 24
"""Entries of a tile of keys, and at most of its distances."""


def nearest(queries: Tensor, keys: np.ndarray, neighbours: int) -> tuple[Tensor, Tensor]:
    """Squared distances [N, k] and rows [N, k] of the keys [M, D] nearest to queries [N, D], nearest first.

    d = |q|^2 - 2 q.k + |k|^2, in single precision. Of a tile only keys nearer than the worst neighbour so far
    are looked at further, and soon these are few.
    """
    count, neighbours = len(keys), min(neighbours, len(keys))
    queries = queries.float()
    distances = queries.new_empty(len(queries), 0)
    rows = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    step = max(1024, TILE // max(keys.shape[1], len(queries)))
    for start in range(0, count, step):
        tile = torch.from_numpy(np.array(keys[start : start + step])).to(queries.device).float()
        norms = torch.linalg.vector_norm(tile, dim=1).square()
        new = torch.addmm(norms.unsqueeze(0), queries, tile.T, alpha=-2)
        some = min(neighbours, new.shape[1])
        if distances.shape[1] == neighbours:
            some = min(some, int((new < distances[:, -1:]).sum(1).max()))
            if not some:
                continue
        new, columns = new.topk(some, largest=False)
        distances = torch.cat([distances, new], 1)
        rows = torch.cat([rows, columns + start], 1)
        distances, order = distances.topk(min(neighbours, distances.shape[1]), largest=False)
        rows = rows.gather(1, order)
    return (distances + queries.square().sum(1, keepdim=True)).clamp_min(0), rows


def squared_distances(queries: Tensor, keys: np.ndarray, rows: Tensor) -> Tensor:
    """[N, K] of queries [N, D] from the keys of `rows` [N, K]; infinite where a row is -1."""
    distances = torch.empty(rows.shape, device=queries.device)
    step = max(1, TILE // max(1, rows.shape[1] * keys.shape[1]))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        near = torch.from_numpy(keys[some.clamp_min(0).cpu().numpy()]).to(queries.device).float()
        apart = near.sub_(queries[start : start + step].float().unsqueeze(1))
        distances[start : start + step] = apart.square_().sum(-1)
    return distances.masked_fill(rows < 0, torch.inf)
