"""An IVF-PQ index of a store's keys, by faiss: a search looks at some lists, and at a code of each key there.

Keys are parted into lists by k-means (IVF); what is left of them beside their list's centre is coded in a
byte for each of some runs of coordinates (PQ). Jegou et al. 2011. The nearest by these codes, some more than
are wanted, are ordered by their exact distances (`polyformer.datastore.store`). How many lists are looked at
is measured when the index is made: the fewest that find nearly what all of them find.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import NO_SPACE, atomic_write, read_json, write_json
from polyformer.datastore.checksums import file_checksum
from polyformer.datastore.flat import nearest, squared_distances
from polyformer.datastore.manifest import Manifest
from polyformer.training.lock import sole_writer

INDEX, ABOUT = "index.faiss", "index.json"
FEWEST = 256 * 39
"""Keys below which an index cannot be trained well, and is no faster."""

CHUNK = 1 << 16
SAMPLE = 1 << 18
"""Keys that are added at once, and that the index is trained on at most."""

ROUNDS, POINTS = 10, 64
"""Of k-means, and keys for each centre that it is trained on: more are slow, and find little more."""

QUERIES = 256
"""Keys by which the number of lists to look at is chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexConfig(Config):
    """`recall`: of what all lists would find, the least that is to be found."""

    lists: int | None = None  # by default 4 sqrt(keys)
    bytes: int = 64  # of a key's code, at most
    oversample: float = 2.0  # candidates for each neighbour
    neighbours: int = 1024  # for which the number of lists to look at is chosen
    recall: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.recall <= 1 or self.oversample < 1 or min(self.bytes, self.neighbours) < 1:
            raise InputError("index: expected recall in (0, 1], and oversample, bytes and neighbours >= 1")
        if self.lists is not None and self.lists < 1:
            raise InputError(f"lists: expected 1 or more, got {self.lists}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class About(Config):
    """What is known of an index. count, dimension, model: of the store whose keys it has. recall: of the
    nearest neighbours, the share that it finds with `probes` lists. checksum: CRC-32 of the file; None of one
    that was made without."""

    count: int
    dimension: int
    model: str
    lists: int
    bytes: int
    probes: int
    oversample: float
    recall: float
    checksum: int | None = None

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """A small one."""
        return (cls(count=1, dimension=1, model="", lists=1, bytes=1, probes=1, oversample=1.0, recall=1.0),)


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """faiss's index, and what is known of it."""

    faiss: Any
    about: About

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Self | None:
        """The index in `folder`, mapped and not read; None where there is none.

        Raises `InputError` for a damaged one, and for that of other keys.
        """
        if not (folder / ABOUT).exists():
            return None
        about = About.from_dict(read_json(folder / ABOUT, dict))
        way = f"make it again by polyformer datastore index {folder}"
        if (about.count, about.dimension, about.model) != (
            manifest.count,
            manifest.dimension,
            manifest.model,
        ):
            raise InputError(f"{folder / INDEX}: of another store's keys; {way}")
        faiss = imported_faiss()
        try:
            index = faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            raise InputError(f"{folder / INDEX}: missing or damaged; {way}") from error
        if (index.d, index.ntotal) != (about.dimension, about.count):
            raise InputError(f"{folder / INDEX}: damaged; {way}")
        index.nprobe = about.probes
        return cls(index, about)

    def candidates(self, queries: Tensor, neighbours: int) -> Tensor:
        """Rows [N, K] of keys that may be the nearest, K >= neighbours; -1 where the lists have no more."""
        faiss = imported_faiss()
        faiss.omp_set_num_threads(torch.get_num_threads())
        count = min(math.ceil(neighbours * self.about.oversample), self.about.count)
        _, rows = self.faiss.search(queries.detach().float().cpu().numpy(), count)
        return torch.from_numpy(rows).to(queries.device)


def verify_index(folder: Path, manifest: Manifest) -> None:
    """Raises `InputError` where there is an index, and it is damaged."""
    if (index := Index.read(folder, manifest)) is None or index.about.checksum is None:
        return
    if file_checksum(folder / INDEX) != index.about.checksum:
        raise InputError(
            f"{folder / INDEX}: not what was written; make it again by polyformer datastore index {folder}"
        )


def imported_faiss() -> Any:
    """The module; `InputError` says how it is installed."""
    try:
        import faiss
    except ImportError as error:
        raise InputError("an index needs faiss: pip install polyformer[datastore]") from error
    return faiss


def make_index(folder: Path, manifest: Manifest, keys: np.ndarray, config: IndexConfig) -> About:
    """Train an index on a sample of the keys [M, D], add all of them, choose how many lists to look at.

    The new index takes the place of an older one. Raises `InputError` for too few keys and a full disk.
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
    # "np": no polysemous training, which takes minutes and orders codes for a search that is not made here
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
        (folder / ABOUT).unlink(missing_ok=True)  # without it there is no index
        atomic_write(folder / INDEX, lambda partial: _write(index, partial))
        about = dataclasses.replace(about, checksum=file_checksum(folder / INDEX))
        write_json(folder / ABOUT, about.to_dict())
    return about


def tuned(index: Index, keys: np.ndarray, chosen: np.ndarray, config: IndexConfig) -> About:
    """`index.about` with the fewest lists, a power of 2, that find enough for the keys `chosen`."""
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
    except RuntimeError as error:  # it has only text
        raise OSError(min(NO_SPACE), "faiss could not write", str(path)) from error
