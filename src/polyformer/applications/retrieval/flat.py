"""Exact search for the nearest keys among all keys, in tiles of the mapped file that stay in the cache.

d = |q|^2 - 2 q.k + |k|^2, in single precision. Most of a tile is skipped: the least distance within each run
of keys shows whether any of them can be among the nearest, which soon becomes rare.
"""

import warnings
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from polyformer.core.ops.linear import linear
from polyformer.core.ops.tuning import core_cache

TILE = 1 << 24
"""Numbers per tile of keys on devices other than a CPU, where the cache size determines it."""

RUN = 32  # keys per run; the least distance of a run is compared first


@torch.no_grad()
def nearest(queries: Tensor, keys: np.ndarray, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return squared distances and rows, [N, k] each, of the keys [M, D] nearest to queries [N, D]."""
    count, width = keys.shape
    queries, halves = queries.float(), resident(keys, queries.device)
    nearest_yet = Nearest(len(queries), min(neighbours, count), queries.device)
    step = tile_rows(width, len(queries), queries.device)
    tile = queries.new_empty(min(step, count), width)
    doubled = -2 * queries
    for start in range(0, count, step):
        some = tile[: min(step, count - start)].copy_(halves[start : start + step])
        distances = linear(some, doubled)
        distances += torch.linalg.vector_norm(some, dim=1).square_().unsqueeze(1)
        nearest_yet.look(distances, start)
    distances, rows = nearest_yet.best()
    return (distances + queries.square().sum(1, keepdim=True)).clamp_min_(0), rows


@torch.no_grad()
def squared_distances(queries: Tensor, keys: np.ndarray, rows: Tensor) -> Tensor:
    """Return the squared distances [N, K] of queries [N, D] to keys of `rows` [N, K]; infinite for row -1."""
    distances, halves = queries.new_empty(rows.shape, dtype=torch.float32), resident(keys, queries.device)
    places = rows.clamp_min(0).to(halves.device)
    step = queries_together(rows.shape[1] * keys.shape[1], queries.device)
    for query, some, result in zip(*(x.split(step) for x in (queries.float(), places, distances))):
        near = halves.index_select(0, some.flatten()).to(queries.device).float().unflatten(0, some.shape)
        torch.sum(near.sub_(query.unsqueeze(1)).square_(), 2, out=result)
    return distances.masked_fill_(rows < 0, torch.inf)


def queries_together(numbers: int, device: torch.device) -> int:
    """Return the number of queries to compute together, given the size of each query's keys.

    On a CPU only the keys of a single query fit into a cache.
    """
    return 1 if device.type == "cpu" else max(1, TILE // numbers)


def resident(keys: np.ndarray, device: torch.device) -> Tensor:
    """Return the keys in the memory of a device, where they stay for later calls; else on the CPU.

    They stay on a device if they take less than half of its free memory.
    """
    if device.type == "cpu":
        return as_tensor(keys)
    array, copy = _copies.get((id(keys), device), (lambda: None, None))
    if array() is keys and copy is not None:
        return copy
    if 2 * keys.nbytes > _free_memory(device):
        return as_tensor(keys)
    key, copy = (id(keys), device), as_tensor(keys).to(device)
    _copies[key] = weakref.ref(keys, lambda _: _copies.pop(key, None)), copy
    return copy


_copies: dict[tuple[int, torch.device], tuple[Callable[[], np.ndarray | None], Tensor]] = {}


def _free_memory(device: torch.device) -> int:
    """Return the free bytes of an accelerator; 0 if they are unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def as_tensor(keys: np.ndarray) -> Tensor:
    """Return a tensor that shares the memory of `keys`; without torch's warning, as nothing writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(keys)


def tile_rows(width: int, queries: int, device: torch.device) -> int:
    """Return the number of keys per tile: keys and distances have twice the size of the threads' caches."""
    numbers = TILE
    if device.type == "cpu":
        numbers = torch.get_num_threads() * core_cache() // 2
    return max(4 * RUN, numbers // (width + queries) // RUN * RUN)


class Nearest:
    """The `count` smallest distances of each query so far, and their rows."""

    def __init__(self, queries: int, count: int, device: torch.device):
        self.distances = torch.full((queries, count), torch.inf, device=device)
        self.rows = torch.zeros(queries, count, dtype=torch.long, device=device)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.size = 0

    def look(self, distances: Tensor, first: int) -> None:
        """Add the distances [n, N] of the keys from row `first` on."""
        whole = len(distances) // RUN * RUN
        for part, run in ((distances[:whole], RUN), (distances[whole:], 1)):
            if len(part):
                self._look(part.view(-1, run, part.shape[1]), first)
            first += whole

    def _look(self, runs: Tensor, first: int) -> None:
        """Keep the distances below the largest kept distance; runs: [n, run, N]."""
        limit = self.distances[:, -1]
        # negated, so that a NaN does not hide its run
        number, query = (~(runs.amin(1) >= limit)).nonzero(as_tuple=True)
        some = runs[number, :, query]
        hit, place = (some < limit[query].unsqueeze(1)).nonzero(as_tuple=True)
        rows = number[hit] * runs.shape[1] + place + first
        self.waiting.append((query[hit], some[hit, place], rows))
        self.size += len(rows)
        if self.size > self.distances.numel():
            self._merge()

    def _merge(self) -> None:
        """Merge the candidates that wait into the kept distances."""
        query, distances, rows = (torch.cat(parts) for parts in zip(*self.waiting))
        self.waiting, self.size = [], 0
        query, order = query.sort(stable=True)
        counts = query.bincount(minlength=len(self.rows))
        column = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
        shape = len(self.rows), int(counts.max())
        new = self.distances.new_full(shape, torch.inf).index_put_((query, column), distances[order])
        places = self.rows.new_zeros(shape).index_put_((query, column), rows[order])
        count = self.distances.shape[1]
        self.distances, order = torch.cat([self.distances, new], 1).topk(count, largest=False)
        self.rows = torch.cat([self.rows, places], 1).gather(1, order)

    def best(self) -> tuple[Tensor, Tensor]:
        """Return distances and rows [N, count], nearest first; infinite for missing neighbours."""
        if self.waiting:
            self._merge()
        return self.distances, self.rows
