"""Search for the nearest keys: exact among all keys, or by an IVF-PQ index that scans some of them.

The exact search reads tiles of the mapped file that stay in the cache: d = |q|^2 - 2 q.k + |k|^2, in single
precision. Most of a tile is skipped: the least distance within each run of keys shows whether any of them can
be among the nearest, which soon becomes rare.

The index is faiss's. k-means assigns each key to a list (IVF). The difference between the key and its list's
centre is coded by product quantization, in a byte for each run of coordinates (PQ). Jegou et al. 2011. A
search takes some more candidates by these codes than needed and orders them by exact distance
(`polyformer.applications.retrieval.store`). The number of lists to scan is measured when the index is built:
the fewest that find nearly all neighbours that a scan of all lists finds.
"""

import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from annotated_types import Ge, Interval, Le
from torch import Tensor

from polyformer.applications.retrieval.entries import Manifest, file_checksum
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import NO_SPACE, atomic_write, read_json, write_json
from polyformer.core.imports import needs_extra
from polyformer.core.ops.linear import linear
from polyformer.core.ops.tuning import core_cache
from polyformer.core.ranges import SIZE, PositiveInt, PositiveShare, check_range
from polyformer.training.run_control import sole_writer

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


INDEX, ABOUT = "index.faiss", "index.json"
FEWEST = 256 * 39
"""Least number of keys: with fewer keys, an index cannot be trained well and is no faster."""

CHUNK = 1 << 16
SAMPLE = 1 << 18
"""Keys that are added per call, and the most keys that the index is trained on."""

ROUNDS, POINTS = 10, 64
"""Iterations of k-means, and training keys per centre: more are slow and hardly improve the recall."""

QUERIES = 256  # keys that are used as queries to choose the number of lists to scan


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexConfig(Config):
    """Options of an index. recall: the least recall, relative to a scan of all lists."""

    lists: PositiveInt | None = None  # by default 4 sqrt(keys)
    bytes: PositiveInt = 64  # of a key's code, at most
    oversample: Annotated[float, Ge(1)] = 2.0  # candidates for each neighbour
    neighbours: PositiveInt = 1024  # per query when the number of lists to scan is chosen
    recall: PositiveShare = 0.95
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class About(Config):
    """The content of index.json."""

    count: PositiveInt  # this and the next two: of the store with its keys
    dimension: PositiveInt
    model: str
    lists: PositiveInt
    bytes: PositiveInt
    probes: PositiveInt  # lists that a search scans
    oversample: Annotated[float, Interval(ge=1, le=SIZE)]  # candidates per neighbour
    recall: float  # the share of the nearest neighbours that a search finds with these settings
    checksum: int | None = None  # CRC-32 of the file; None in older stores

    def __post_init__(self) -> None:
        check_range("probes", self.probes, Le(self.lists))

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (cls(count=1, dimension=1, model="", lists=1, bytes=1, probes=1, oversample=1.0, recall=1.0),)


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """A faiss index and its description."""

    faiss: Any
    about: About

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Self | None:
        """Return the index in `folder`, memory-mapped; None if there is none.

        The file is read once, about a second per gigabyte, to compare its checksum: faiss does not detect
        most damage and would silently return wrong neighbours. Raises `InputError` for a damaged index, an
        index of another kind or an index of other keys.
        """
        if not (folder / ABOUT).exists():
            return None
        way = f"make it again by polyformer datastore index {folder}"
        try:
            about = About.from_dict(read_json(folder / ABOUT, dict))
        except InputError as error:
            raise InputError(f"{folder / ABOUT}: damaged ({error}); {way}") from error
        own = about.count, about.dimension, about.model
        if own != (manifest.count, manifest.dimension, manifest.model):
            raise InputError(f"{folder / INDEX}: of another store's keys; {way}")
        faiss = imported_faiss()
        if not (folder / INDEX).is_file():
            raise InputError(f"{folder / INDEX}: missing; {way}")
        if about.checksum is not None and file_checksum(folder / INDEX) != about.checksum:
            raise InputError(f"{folder / INDEX}: damaged: not what was written; {way}")
        try:
            index = faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        except (RuntimeError, MemoryError) as error:
            raise InputError(f"{folder / INDEX}: damaged; {way}") from error
        if not isinstance(index, faiss.IndexIVFPQ):
            raise InputError(f"{folder / INDEX}: expected an IVF-PQ index, got {type(index).__name__}; {way}")
        if (index.d, index.ntotal, index.nlist) != (about.dimension, about.count, about.lists):
            raise InputError(f"{folder / INDEX}: damaged; {way}")
        index.nprobe = about.probes
        return cls(index, about)

    def candidates(self, queries: Tensor, neighbours: int) -> Tensor:
        """Return rows [N, K] of candidate keys, K >= neighbours; -1 if the scanned lists have no more."""
        faiss = imported_faiss()
        faiss.omp_set_num_threads(torch.get_num_threads())
        count = min(math.ceil(neighbours * self.about.oversample), self.about.count)
        _, rows = self.faiss.search(queries.detach().float().cpu().numpy(), count)
        return torch.from_numpy(rows).to(queries.device)


def imported_faiss() -> Any:
    """Return the module faiss; the `InputError` for a missing installation explains how to install it."""
    with needs_extra("datastore", "an index needs faiss"):
        import faiss
    return faiss


def make_index(folder: Path, manifest: Manifest, keys: np.ndarray, config: IndexConfig) -> About:
    """Train an index on a sample of the keys [M, D], add all keys and choose the number of lists to scan.

    The new index replaces an older index. Raises `InputError` for too few keys and for a full disk.
    """
    faiss, count = imported_faiss(), len(keys)
    if count < FEWEST:
        raise InputError(
            f"{folder}: an index needs {FEWEST:,} entries or more, and the store has {count:,}; without one "
            "all keys are compared, which is as fast for so few"
        )
    faiss.omp_set_num_threads(torch.get_num_threads())
    generator = np.random.default_rng(config.seed)
    lists = min(config.lists or round(4 * math.sqrt(count)), count // 39)
    code = max(size for size in range(1, config.bytes + 1) if manifest.dimension % size == 0)
    # "np": no polysemous training, which takes minutes and orders codes for a kind of search that is not used
    index = faiss.index_factory(manifest.dimension, f"IVF{lists},PQ{code}np")
    for training in (index.cp, index.pq.cp):
        training.seed, training.niter, training.max_points_per_centroid = config.seed, ROUNDS, POINTS
    size = min(count, max(POINTS * lists, CHUNK), SAMPLE)
    index.train(keys[np.sort(generator.choice(count, size, replace=False))].astype(np.float32))
    for start in range(0, count, CHUNK):
        index.add(keys[start : start + CHUNK].astype(np.float32))
    about = About(
        count=count,
        dimension=manifest.dimension,
        model=manifest.model,
        lists=lists,
        bytes=code,
        probes=lists,
        oversample=config.oversample,
        recall=1.0,
    )
    chosen = generator.choice(count, min(QUERIES, count), replace=False)
    about = tuned(Index(index, about), keys, np.sort(chosen), config)
    with sole_writer(folder, "the index is then made from the beginning"):
        (folder / ABOUT).unlink(missing_ok=True)  # an index without this file is ignored
        atomic_write(folder / INDEX, lambda partial: _write(index, partial))
        about = dataclasses.replace(about, checksum=file_checksum(folder / INDEX))
        write_json(folder / ABOUT, about.to_dict())
    return about


def tuned(index: Index, keys: np.ndarray, chosen: np.ndarray, config: IndexConfig) -> About:
    """Return `index.about` with the fewest lists, a power of 2, with enough recall on the keys `chosen`."""
    queries = torch.from_numpy(keys[chosen].astype(np.float32))
    neighbours = min(config.neighbours, len(keys))
    _, truth = nearest(queries, keys, neighbours)
    recalls: dict[int, float] = {}
    for probes in [*(2**power for power in range(index.about.lists.bit_length())), index.about.lists]:
        index.faiss.nprobe = probes
        rows = index.candidates(queries, neighbours)
        order = squared_distances(queries, keys, rows).topk(neighbours, largest=False).indices
        nearest_rows = rows.gather(1, order)
        hits = [len(np.intersect1d(own, other)) for own, other in zip(nearest_rows.numpy(), truth.numpy())]
        recalls[probes] = sum(hits) / truth.numel()
    enough = config.recall * recalls[index.about.lists]
    probes = min(probes for probes, recall in recalls.items() if recall >= enough)
    return dataclasses.replace(index.about, probes=probes, recall=recalls[probes])


def _write(index: Any, path: Path) -> None:
    try:
        imported_faiss().write_index(index, str(path))
    except RuntimeError as error:  # faiss raises only this type, with a text
        raise OSError(min(NO_SPACE), "faiss could not write", str(path)) from error
