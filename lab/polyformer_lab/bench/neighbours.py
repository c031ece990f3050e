"""Searches for nearest neighbours: among the keys of a datastore (neighbours), and in the store of a
Memorizing Transformer (store).
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
from polyformer.core.sequence.context import Context
from polyformer.nn.memory.store import SEARCHES, Store, gather_entries
from polyformer_lab.bench.rows import OURS, AbsentError, Bench, Case, Make, Row
from polyformer_lab.bench.running import runner

CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighboursBench(Bench):
    """Search among the keys of a datastore by comparing all keys, compared with the flat search of faiss in
    memory, an IVF-PQ index with its recall, and a Milvus server.

    Keys are drawn around centres, in a space of fewer dimensions than their width, like hidden states;
    queries are drawn like keys. The store is in FOLDER, and in the collection `milvus`, and is reused. `read`
    is the time in which all threads read the mapped keys once: no search of all keys is faster. With many
    queries the products take most of the time, so their share of the product speed is shown too.

    Other sizes require another `folder`.
    """

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


run_neighbours = runner(NeighboursBench)


PEER, WIDE = "memorizing-transformers", "memorizing-transformers-wide"

ROOM = 8
"""The capacity of the store, as a multiple of the new entries, if every measured run is one call: a full
store drops all its entries.
"""

WAY = "pip install --no-deps memorizing-transformers-pytorch einops einops-exts joblib filelock"
"""The way to install it: its requirement `faiss-gpu` installs on no current Python, but faiss-cpu does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreBench(Bench):
    """The cost of a segment for a Memorizing Transformer's layer with a large store: milliseconds per head to
    look up the nearest entries of its queries, with their values, and to store its own keys.

    Ours with every search, all exact, compared with memorizing-transformers-pytorch and its approximate index
    (HNSW): `recall` is the share of the nearest entries that it finds, with its default search and with a
    search wide enough to find at least `wanted`. Keys are unit vectors drawn around centres, in a space of
    fewer dimensions than their width, like keys of attention; queries are drawn like keys.

    The measurement is for one head.
    """

    entries: int = 65_536
    queries: int = 512
    width: int = 64
    neighbours: int = 32
    centres: int = 1024
    rank: int = 16  # dimensions in which keys differ from their centre
    wanted: float = 0.95  # recall
    peer: bool = True  # include memorizing-transformers-pytorch
    repeats: int = 7

    def rows(self) -> Iterator[Row]:
        """Yield the only row: looking up, with every search, and storing."""
        what = f"{self.queries} queries, {self.neighbours} nearest of {self.entries} keys of {self.width}"
        pairs = [(f"{OURS}-{name}", peer) for name in SEARCHES for peer in (PEER, WIDE)]
        yield Row("store", what, self._cases, [*pairs, (OURS, PEER)], repeats=self.repeats)

    def _cases(self) -> Iterator[Case]:
        torch.manual_seed(0)
        keys, values, queries = (drawn_entries(self, n) for n in (self.entries, self.entries, self.queries))
        exact = SEARCHES["plain"](queries, keys, self.neighbours)[0][0, :, -1]
        recalls: dict[str, dict[str, float]] = {}

        @functools.cache
        def public(name: str) -> PublicStore:
            room = 0 if name == WIDE else ROOM * (self.repeats + 2) * self.queries
            store = PublicStore(keys, values, self.neighbours, Path(folder, name), room)
            width = self.neighbours
            while name == WIDE and store.recall(queries, exact) < self.wanted and width < self.entries:
                width *= 2
                store.widen(width)
            recalls[name] = {"recall": store.recall(queries, exact)}
            if name == WIDE:
                recalls[name]["efSearch"] = width
            return store

        ours: dict[str, Make] = {
            f"{OURS}-{name}": lambda name=name: functools.partial(
                _looked_up, name, queries, keys, values, self.neighbours
            )
            for name in SEARCHES
        }
        peers = (PEER, WIDE) if self.peer else ()
        theirs: dict[str, Make] = {
            name: lambda name=name: functools.partial(public(name).search, queries) for name in peers
        }
        facts = {name: lambda name=name: recalls[name] for name in peers}
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            yield Case(
                ours | theirs, "look up", ours=tuple(ours), work={"queries": self.queries}, facts=facts
            )
            stores: dict[str, Make] = {OURS: lambda: storing(keys, values, queries)}
            for name in peers[:1]:
                stores[name] = lambda: functools.partial(public(PEER).add, queries)
            yield Case(stores, "store", work={"entries": self.queries})


def drawn_entries(config: StoreBench, count: int) -> Tensor:
    """Return unit vectors [1, count, width]."""
    fixed = torch.Generator().manual_seed(2)
    centres = torch.randn(config.centres, config.width, generator=fixed)
    basis = torch.randn(config.rank, config.width, generator=fixed) / config.rank**0.5
    vectors = centres[torch.randint(config.centres, (count,))] + torch.randn(count, config.rank) @ basis
    return F.normalize(vectors, dim=-1).unsqueeze(0)


def storing(keys: Tensor, values: Tensor, new: Tensor) -> Callable[[], object]:
    """Return a call that appends the new entries to a full store at every run."""
    size, state = keys.shape[1], [Store()]

    def store() -> None:
        more = new.unsqueeze(0)
        state[0] = state[0].append(more, more, Context(new.shape[1], new.shape[1], causal=True), size)

    state[0] = state[0].append(keys.unsqueeze(0), values.unsqueeze(0), Context(size, size, causal=True), size)
    return store


def _looked_up(name: str, queries: Tensor, keys: Tensor, values: Tensor, count: int) -> object:
    scores, places = SEARCHES[name](queries, keys, count)
    return scores, gather_entries(values, places)


class PublicStore:
    """A `KNNMemory` of one index, in one process, from memorizing-transformers-pytorch; `room` is the number
    of further entries, since a full store drops all its entries.
    """

    def __init__(self, keys: Tensor, values: Tensor, neighbours: int, file: Path, room: int):
        try:
            from memorizing_transformers_pytorch.knn_memory import (  # pyright: ignore[reportMissingImports]
                KNNMemory,
            )
        except ImportError as error:
            raise AbsentError(f"not installed ({WAY})") from error
        width, number = keys.shape[-1], keys.shape[1] + room
        self.neighbours = neighbours
        self.memory = KNNMemory(width, number, memmap_filename=str(file), multiprocessing=False)
        self.memory.add(torch.stack([keys, values], 2))

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, R, k, 2, D] of queries [1, R, D], and a mask of the existing entries."""
        return self.memory.search(queries, self.neighbours)

    def add(self, new: Tensor) -> None:
        """Append entries [1, R, D]."""
        self.memory.add(torch.stack([new, new], 2))

    def widen(self, width: int) -> None:
        """Set the number of entries that a search visits."""
        self.memory.knns[0].index.hnsw.efSearch = width

    def recall(self, queries: Tensor, least: Tensor) -> float:
        """Return the recall for queries [1, R, D]: the share of the entries with products of at least `least`
        [R], the products of the last nearest entries.
        """
        entries, there = self.search(queries)
        products = torch.einsum("rd,rkd->rk", queries[0], entries[0, :, :, 0])
        return float(((products >= least.unsqueeze(1) - 1e-5) & there[0]).float().mean())


run_store = runner(StoreBench)
