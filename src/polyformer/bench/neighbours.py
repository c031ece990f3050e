"""Search among the keys of a datastore: milliseconds a query by comparing all keys, beside faiss's own flat
search in memory, by an IVF-PQ index with its recall, and by a Milvus server.

Keys are drawn around centres, in a space of fewer dimensions than they have, as hidden states are; queries
are drawn as keys. The store lies in OUT, and in the collection `milvus`, and is used again. `read` is what
all threads take to read the mapped keys once: no search of all keys is faster. Of many queries it is the
products that take the time, so their speed is shown too.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from polyformer.bench.timing import in_turn, median, stopwatch
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_directory
from polyformer.datastore.entries import KEYS, VALUES
from polyformer.datastore.flat import as_tensor, nearest
from polyformer.datastore.index import IndexConfig, imported_faiss, make_index
from polyformer.datastore.manifest import Manifest
from polyformer.datastore.milvus_lease import held
from polyformer.datastore.milvus_server import Address, Server
from polyformer.datastore.milvus_store import (
    MANIFEST_ROW,
    MilvusStore,
    MilvusWriter,
    create_entries,
    open_in_milvus,
)
from polyformer.datastore.store import FolderStore, open_folder
from polyformer.datastore.windows import Reading
from polyformer.training.config import at_least

CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighboursBench(Config):
    """What is measured. Other sizes need another `out`."""

    entries: int = 1_000_000
    width: int = 256
    batch: int = 64
    neighbours: int = 1024
    centres: int = 4096
    rank: int = 64  # dimensions in which keys differ from their centre
    repeats: int = 5
    out: str = "runs/neighbours"
    milvus: str | None = None  # http://HOST:PORT/NAME or FILE.db/NAME, of as many entries

    def __post_init__(self) -> None:
        sizes = {"entries": self.entries, "width": self.width, "batch": self.batch, "repeats": self.repeats}
        at_least(1, **sizes, neighbours=self.neighbours, centres=self.centres, rank=self.rank)


def run(config: NeighboursBench) -> dict[str, float]:
    """Print milliseconds a query of each search; returns them by name, and the index's recall."""
    store = stored(config)
    queries = torch.from_numpy(drawn(config, np.random.default_rng(1), config.batch)).float()
    faiss = imported_faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    whole, flat = store.keys.astype(np.float32), open_folder(store.folder, "flat")
    content = as_tensor(store.keys.reshape(-1)).view(torch.int16)
    searches: dict[str, Callable[[], object]] = {
        "read": content.view(torch.int64 if content.numel() % 4 == 0 else torch.int16).sum,
        "flat": functools.partial(flat.search, queries, config.neighbours),
        "faiss, float32 in memory": lambda: faiss.knn(queries.numpy(), whole, config.neighbours),
    }
    if store.index is not None:
        searches["IVF-PQ"] = functools.partial(store.search, queries, config.neighbours)
    if config.milvus is not None:
        served = in_milvus(config.milvus, store)
        searches["Milvus"] = functools.partial(served.search, queries, config.neighbours)
    taken = {
        name: 1e3 * median(seconds) / config.batch
        for name, seconds in in_turn(searches, config.repeats).items()
    }
    for name, milliseconds in taken.items():
        print(f"{name:<26}{milliseconds:>9.3f} ms a query")
    read, searched = (1e-3 * config.batch * taken[name] for name in ("read", "flat"))
    speed, products = store.keys.nbytes / read / 1e9, 2 * config.batch * store.keys.size / searched / 1e9
    print(f"flat: {100 * read / searched:.0f} % of the memory's {speed:.1f} GB/s; {products:.0f} GFLOP/s")
    if store.index is not None:
        taken["recall"] = recall(store, queries, config.neighbours)
        about = store.index.about
        print(f"IVF-PQ: recall {taken['recall']:.3f}, {about.probes} of {about.lists} lists looked at")
    return taken


def in_milvus(name: str, store: FolderStore) -> MilvusStore:
    """The entries of `store` in a collection, sent unless they are there."""
    address = Address.of(name)
    if address is None:
        raise InputError(f"milvus: expected http://HOST:PORT/NAME or FILE.db/NAME, got {name}")
    server = Server(address)
    if MANIFEST_ROW not in server.rows():
        server.create_about()
        create_entries(server, store.manifest.dimension)
        with held(server, store.manifest) as lease:
            writer = MilvusWriter(server, store.manifest, {}, lease)
            for start in range(0, len(store.keys), CHUNK):
                some = slice(start, start + CHUNK)
                writer.add(np.asarray(store.keys[some]), store.values[some], 1)
            writer.finish()
            server.write(MANIFEST_ROW, store.manifest.to_dict())
    return open_in_milvus(address)


def recall(store: FolderStore, queries: torch.Tensor, neighbours: int) -> float:
    """The share of the nearest entries whose distances the index finds."""
    exact, _ = nearest(queries, store.keys, neighbours)
    near = store.search(queries, neighbours).distances
    return float((near <= exact[:, -1:] * (1 + 1e-5)).float().mean())


def stored(config: NeighboursBench) -> FolderStore:
    """The store in OUT with its index, drawn and trained unless it is there."""
    folder = Path(config.out)
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
        seconds = stopwatch(lambda: make_index(folder, store.manifest, store.keys, settings))
        print(f"the index took {seconds:.0f} s")
    return open_folder(folder)


def drawn(config: NeighboursBench, generator: np.random.Generator, count: int) -> np.ndarray:
    """Keys [count, width] in float16."""
    fixed = np.random.default_rng(2)
    centres = fixed.normal(size=(config.centres, config.width)).astype(np.float32)
    basis = fixed.normal(size=(config.rank, config.width)).astype(np.float32) / np.sqrt(config.rank)
    noise = generator.normal(size=(count, config.rank)).astype(np.float32)
    return (centres[generator.integers(0, config.centres, count)] + noise @ basis).astype(np.float16)
