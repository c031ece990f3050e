"""Search among the keys of a datastore by comparing all keys, compared with the flat search of faiss in
memory, an IVF-PQ index with its recall, and a Milvus server.

Keys are drawn around centres, in a space of fewer dimensions than their width, like hidden states; queries
are drawn like keys. The store is in FOLDER, and in the collection `milvus`, and is reused. `read` is the time
in which all threads read the mapped keys once: no search of all keys is faster. With many queries the
products take most of the time, so their share of the product speed is shown too.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from polyformer.applications.retrieval.entries import KEYS, VALUES, Manifest
from polyformer.applications.retrieval.milvus import (
    MANIFEST_ROW,
    Address,
    MilvusStore,
    MilvusWriter,
    Server,
    create_entries,
    open_in_milvus,
    sole_builder,
)
from polyformer.applications.retrieval.readers import Reading
from polyformer.applications.retrieval.search import (
    IndexConfig,
    as_tensor,
    imported_faiss,
    make_index,
    nearest,
)
from polyformer.applications.retrieval.store import FolderStore, open_folder
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_directory
from polyformer.core.measuring import time_once
from polyformer_lab.bench.rows import OURS, Bench, Case, Make, Row
from polyformer_lab.bench.running import runner

CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighboursBench(Bench):
    """The settings of the measurement. Other sizes require another `folder`."""

    entries: int = 1_000_000
    width: int = 256
    batch: int = 64
    neighbours: int = 1024
    centres: int = 4096
    rank: int = 64  # dimensions in which keys differ from their centre
    repeats: int = 5
    folder: str = "runs/neighbours"
    milvus: str | None = None  # http://HOST:PORT/NAME or FILE.db/NAME, with the same number of entries

    def rows(self) -> Iterator[Row]:
        """Yield the only row."""
        what = f"{self.batch} queries, {self.neighbours} nearest of {self.entries} keys of {self.width}"
        yield Row("neighbours", what, self._cases, repeats=self.repeats)

    def _cases(self) -> Iterator[Case]:
        faiss = imported_faiss()
        faiss.omp_set_num_threads(torch.get_num_threads())
        store = stored(self)
        flat = open_folder(store.folder, "flat")
        queries = torch.from_numpy(drawn(self, np.random.default_rng(1), self.batch)).float()
        content = as_tensor(store.keys.reshape(-1)).view(torch.int16)

        def in_memory() -> Callable[[], object]:
            whole = store.keys.astype(np.float32)
            return lambda: faiss.knn(queries.numpy(), whole, self.neighbours)

        def search(opened: Callable[[], FolderStore | MilvusStore]) -> Make:
            return lambda: functools.partial(opened().search, queries, self.neighbours)

        searches: dict[str, Make] = {
            "read": lambda: content.view(torch.int64 if content.numel() % 4 == 0 else torch.int16).sum,
            OURS: search(lambda: flat),
            "faiss, float32 in memory": in_memory,
        }
        facts: dict[str, Callable[[], dict[str, float]]] = {}
        if (index := store.index) is not None:
            searches["IVF-PQ"] = search(lambda: store)
            lists = {"lists looked at": index.about.probes, "lists": index.about.lists}
            facts["IVF-PQ"] = lambda: {"recall": recall(store, queries, self.neighbours), **lists}
        if (name := self.milvus) is not None:
            searches["Milvus"] = search(lambda: in_milvus(name, store))
        flop = 2.0 * self.batch * store.keys.size
        work = {"queries": self.batch, "GB of keys": store.keys.nbytes / 1e9}
        yield Case(searches, ours=(*searches,), work=work, flop={OURS: flop}, facts=facts)


def in_milvus(name: str, store: FolderStore) -> MilvusStore:
    """Return the collection with the entries of `store`, which are sent unless they are there."""
    address = Address.of(name)
    if address is None:
        raise InputError(f"milvus: expected http://HOST:PORT/NAME or FILE.db/NAME, got {name}")
    server = Server(address)
    if MANIFEST_ROW not in server.rows():
        server.create_about()
        create_entries(server, store.manifest.dimension)
        with sole_builder(address, store.manifest.part):
            writer = MilvusWriter(server, store.manifest, {})
            for start in range(0, len(store.keys), CHUNK):
                some = slice(start, start + CHUNK)
                writer.add(np.asarray(store.keys[some]), store.values[some], 1)
            writer.finish()
            server.write(MANIFEST_ROW, store.manifest.to_dict())
    return open_in_milvus(address)


def recall(store: FolderStore, queries: torch.Tensor, neighbours: int) -> float:
    """Return the share of the nearest entries, by their distances, that the index finds."""
    exact, _ = nearest(queries, store.keys, neighbours)
    near = store.search(queries, neighbours).distances
    return float((near <= exact[:, -1:] * (1 + 1e-5)).float().mean())


def stored(config: NeighboursBench) -> FolderStore:
    """Return the store in FOLDER with its index, drawn and trained unless it exists."""
    folder = Path(config.folder)
    if not folder.exists():
        generator = np.random.default_rng(0)
        about = {"model": "random", "tokenizer": "none", "key": "hidden", "reading": Reading(), "text": ()}
        with atomic_directory(folder) as new:
            with open(new / KEYS, "wb") as keys, open(new / VALUES, "wb") as values:
                for start in range(0, config.entries, CHUNK):
                    some = drawn(config, generator, min(CHUNK, config.entries - start))
                    keys.write(some.tobytes())
                    values.write(np.zeros(len(some), np.int32).tobytes())
            Manifest(dimension=config.width, count=config.entries, **about).write(new)
    store = open_folder(folder)
    if store.index is None:
        settings = IndexConfig(neighbours=config.neighbours)
        seconds = time_once(lambda: make_index(folder, store.manifest, store.keys, settings))
        print(f"the index took {seconds:.0f} s")
    return open_folder(folder)


def drawn(config: NeighboursBench, generator: np.random.Generator, count: int) -> np.ndarray:
    """Return keys [count, width] in float16."""
    fixed = np.random.default_rng(2)
    centres = fixed.normal(size=(config.centres, config.width)).astype(np.float32)
    basis = fixed.normal(size=(config.rank, config.width)).astype(np.float32) / np.sqrt(config.rank)
    noise = generator.normal(size=(count, config.rank)).astype(np.float32)
    return (centres[generator.integers(0, config.centres, count)] + noise @ basis).astype(np.float16)


run = runner(NeighboursBench)
