"""A store in a Milvus collection, for data that does not fit on one machine, with the same commands.

    COLLECTION         entry (primary key), value, key. The number of an entry is its primary key, so that an
                       entry that is sent twice is stored once, and all parts of a build share a collection.
    COLLECTION_about   plain data by row: 0 manifest, 1 to N progress of each part, -1 mixture, -2 index

Keys are half-precision vectors. The embedded server (milvus-lite) and servers before 2.4, which cannot index
them, store the same numbers in single precision. The indexes compare complete keys (FLAT, IVF_FLAT), so that
the returned distances are exact.

Every call ends within about `TIMEOUT` seconds, the first within `CONNECT`. While the server is unreachable or
overloaded, pymilvus retries the call with increasing delays. This provides back-pressure, because only one
batch is sent at once. A call that still fails then raises `InputError`. A call may thus be executed twice;
all writes are idempotent, because they use the primary key.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.entries import MANIFEST, Manifest
from polyformer.applications.retrieval.readers import ContextReader
from polyformer.applications.retrieval.store import MixtureConfig, Neighbours, Report, Search, write
from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra
from polyformer.core.paths import cache_folder
from polyformer.training.run_control import sole_writer

TIMEOUT, CONNECT = 60.0, 20.0
SERVER = re.compile(r"(?P<uri>(https?|tcp)://[^/]+)(/(?P<name>\w+))?/?")
FILE = re.compile(r"(?P<uri>.+\.db)(/(?P<name>\w+))?")
OTHER = re.compile(r"\w+://")
TOKEN = "MILVUS_TOKEN"
NO_CONNECTION = 2  # pymilvus's Status.CONNECT_FAILED

ROW, CONTENT, UNUSED = "row", "content", "unused"


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of a store: the URI of a server or the file of an embedded server, and a collection."""

    uri: str
    collection: str

    @classmethod
    def of(cls, name: str) -> "Address | None":
        """Parse `http://HOST:19530/COLLECTION` or `FILE.db/COLLECTION`; None for the name of a folder.

        Raises `InputError` for a folder in an embedded server's own folder, and for another kind of address.
        """
        match = SERVER.fullmatch(name)
        if match is None and not (Path(name) / MANIFEST).exists():
            match = FILE.fullmatch(name)
        if match is None:
            _check_folder(name)
            return None
        return cls(match["uri"], match["name"] or "polyformer")

    def __str__(self) -> str:
        return f"{self.uri}/{self.collection}"


def _check_folder(name: str) -> None:
    """Raise `InputError` for a name that is neither an address nor a folder in which a store may be."""
    way = "a collection's NAME has letters, digits and underscores; or choose a folder elsewhere"
    if OTHER.match(name):
        raise InputError(f"{name}: expected http://HOST:19530/NAME, FILE.db/NAME or a folder; {way}")
    for folder in Path(name).parents:
        if (folder / "collections").is_dir() and (folder / "LOCK").is_file():
            raise InputError(
                f"{name}: in the folder of the Milvus database {folder}; expected its collection "
                f"{folder}/NAME; {way}"
            )


class Server:
    """A connection to a server.

    `call` runs any method of pymilvus's client. Plain data has a separate collection.
    """

    def __init__(self, address: Address):
        self.address, self.about = address, f"{address.collection}_about"
        with needs_extra("datastore", f"{address}: needs pymilvus"):
            import pymilvus
        # Errors are reported by this library, in one line. The latter two belong to the embedded server.
        for name in ("pymilvus", "grpc._server", "milvus_lite"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.pymilvus = pymilvus
        options = {"token": token} if (token := os.environ.get(TOKEN)) else {}
        connect = functools.partial(pymilvus.MilvusClient, uri=address.uri, timeout=CONNECT, **options)
        with self.errors():
            self.client: Any = self._patiently(connect, CONNECT)

    def _patiently(self, call: Callable[[], Any], seconds: float) -> Any:
        """Return the result of `call`, repeated while there is no connection: the server may be starting."""
        end = time.monotonic() + seconds
        while True:
            try:
                return call()
            except self.pymilvus.MilvusException as error:
                if time.monotonic() > end or error.code != NO_CONNECTION:
                    raise
                time.sleep(0.5)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Convert errors within the context to `InputError`."""
        import grpc

        try:
            yield
        except (self.pymilvus.MilvusException, grpc.RpcError, OSError, ConnectionError) as error:
            reason = " ".join(str(getattr(error, "message", None) or error).split())
            if "Open local milvus failed" in reason and Path(self.address.uri).exists():
                raise InputError(
                    f"{self.address.uri}: cannot be opened: it is in use by another process (the embedded "
                    "server allows only one), or it is damaged"
                ) from error
            raise InputError(
                f"{self.address.uri}: the Milvus server failed ({reason[:200]}); check that it runs, "
                "then repeat the same command, which resumes the work"
            ) from error

    def call(self, name: str, seconds: float | None = None, **arguments: Any) -> Any:
        """Run one call with a limit of `seconds`, by default `TIMEOUT`; see the module."""
        seconds = TIMEOUT if seconds is None else seconds
        with self.errors():
            call = functools.partial(getattr(self.client, name), timeout=seconds, **arguments)
            return self._patiently(call, seconds)

    def has(self, collection: str) -> bool:
        """Return whether the collection exists."""
        return bool(self.call("has_collection", collection_name=collection))

    def create_about(self) -> None:
        """Create the collection of plain data unless it exists."""
        if self.has(self.about):
            return
        types = self.pymilvus.DataType
        schema = self.client.create_schema(auto_id=False)
        schema.add_field(ROW, types.INT64, is_primary=True)
        schema.add_field(CONTENT, types.VARCHAR, max_length=60_000)
        schema.add_field(UNUSED, types.FLOAT_VECTOR, dim=2)  # Milvus requires a vector field
        index = self.client.prepare_index_params()
        index.add_index(UNUSED, index_type="FLAT", metric_type="L2")
        try:
            self.call("create_collection", collection_name=self.about, schema=schema, index_params=index)
        except InputError:
            if not self.has(self.about):  # another process may have created it meanwhile
                raise

    def write(self, row: int, content: dict[str, Any]) -> None:
        """Save plain data as a row; replaces an older row."""
        rows = [{ROW: row, CONTENT: json.dumps(content), UNUSED: [0.0, 0.0]}]
        self.call("upsert", collection_name=self.about, data=rows)

    def rows(self) -> dict[int, dict[str, Any]]:
        """Return all rows of plain data; raises `InputError` if they cannot be read."""
        if not self.has(self.about):
            return {}
        self.call("load_collection", collection_name=self.about)
        stored = self.call(
            "query",
            collection_name=self.about,
            filter="",
            output_fields=[ROW, CONTENT],
            limit=16_384,
            consistency_level="Strong",
        )
        try:
            return {int(row[ROW]): dict(json.loads(row[CONTENT])) for row in stored}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.address}: its rows are damaged; build the store again") from error


ENTRY, VALUE, KEY = "entry", "value", "key"
MANIFEST_ROW, MIXTURE_ROW, INDEX_ROW = 0, -1, -2
SENT_BYTES = 1 << 22  # bytes of keys per call; the server accepts 64 MiB

ANSWERED = 1 << 16  # neighbours per response

QUERIES = 64  # keys that are used as queries to choose the number of lists to scan


class MilvusWriter:
    """A writer of the entries of a part; see `polyformer.applications.retrieval.store.Writer`."""

    def __init__(self, server: Server, manifest: Manifest, progress: dict[str, Any]):
        self.server, self.manifest = server, manifest
        self.windows, self.entries = int(progress.get("windows", 0)), int(progress.get("entries", 0))
        self.half = key_type(server) == server.pymilvus.DataType.FLOAT16_VECTOR

    def add(self, keys: np.ndarray, values: np.ndarray, windows: int) -> None:
        """Send the entries of the next windows; `commit` makes them permanent."""
        numbers = entry_numbers(self.manifest, self.entries, len(values))
        sent = keys if self.half else keys.astype(np.float32)
        step = max(1, SENT_BYTES // keys[0].nbytes)
        for start in range(0, len(values), step):
            some = slice(start, start + step)
            rows = [
                {ENTRY: int(number), VALUE: int(value), KEY: key}
                for number, value, key in zip(numbers[some], values[some], sent[some])
            ]
            self.server.call("upsert", collection_name=self.server.address.collection, data=rows)
        self.entries += len(values)
        self.windows += windows

    def commit(self) -> None:
        """Commit all entries that were sent."""
        self._write(finished=False)

    def finish(self) -> None:
        """Mark the part as finished."""
        self.server.call("flush", collection_name=self.server.address.collection)
        self._write(finished=True)

    def _write(self, finished: bool) -> None:
        progress = {"windows": self.windows, "entries": self.entries, "finished": finished}
        self.server.write(self.manifest.part, progress)


def entry_numbers(manifest: Manifest, first: int, count: int) -> np.ndarray:
    """Return the positions in the whole text of `count` entries of a part, from its own number `first` on."""
    own, fresh = np.arange(first, first + count), manifest.reading.fresh
    return (own // fresh * manifest.parts + manifest.part - 1) * fresh + own % fresh


def key_type(server: Server) -> Any:
    """Return the vector type of the keys of a collection."""
    described = server.call("describe_collection", collection_name=server.address.collection)
    return next(field["type"] for field in described["fields"] if field["name"] == KEY)


def create_entries(server: Server, dimension: int) -> None:
    """Create the collection of entries unless it exists."""
    name, types = server.address.collection, server.pymilvus.DataType
    if server.has(name):
        return

    def create(kind: Any) -> None:
        schema = server.client.create_schema(auto_id=False)
        schema.add_field(ENTRY, types.INT64, is_primary=True)
        schema.add_field(VALUE, types.INT32)
        schema.add_field(KEY, kind, dim=dimension)
        index = server.client.prepare_index_params()
        index.add_index(KEY, index_type="FLAT", metric_type="L2")
        server.call("create_collection", collection_name=name, schema=schema, index_params=index)

    try:
        create(types.FLOAT16_VECTOR if indexes_half(server) else types.FLOAT_VECTOR)
    except InputError:
        create(types.FLOAT_VECTOR)


def indexes_half(server: Server) -> bool:
    """Return whether the server can index half-precision keys.

    Servers before 2.4 accept them, then always fail.
    """
    version = re.search(r"(\d+)\.(\d+)", str(server.call("get_server_version")))
    return version is None or (int(version[1]), int(version[2])) >= (2, 4)


def sole_builder(address: Address, part: int) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of a part; raises `InputError` if another process of this machine holds it.

    The lock is a file in the user's cache folder, since a server has no locks. A builder on another machine
    is not seen: it must build another part.
    """
    name = re.sub(r"\W+", "-", f"{address} part {part}")[-200:]
    return sole_writer(cache_folder() / "datastores" / name, "the same command resumes it later")


def build_in_milvus(
    reader: ContextReader, texts: Iterable[str], manifest: Manifest, address: Address, report: Report
) -> int:
    """Build or resume the store, or part, that `manifest` describes; return the number of the part's entries.

    Raises `InputError` if the collection contains another store, if another process of this machine builds
    this part, or if the server is unreachable.
    """
    server = Server(address)
    if server.has(address.collection) and MANIFEST_ROW not in server.rows():
        raise InputError(f"{address}: contains something else; choose another --out")
    server.create_about()
    with sole_builder(address, manifest.part):
        rows = server.rows()
        if MANIFEST_ROW in rows:
            begun = Manifest.parsed(rows[MANIFEST_ROW], address)
            dataclasses.replace(begun, part=manifest.part).check_same(manifest, address)
        server.write(MANIFEST_ROW, dataclasses.replace(manifest, part=1).to_dict())
        create_entries(server, manifest.dimension)
        progress = rows.get(manifest.part, {})
        writer = MilvusWriter(server, manifest, progress)
        if not progress.get("finished"):
            write(reader, texts, manifest, writer, report)
            writer.finish()
    return writer.entries


@dataclasses.dataclass(frozen=True, eq=False)
class MilvusStore:
    """A finished store on a server. probes: lists that a search scans; None if it compares all keys."""

    manifest: Manifest
    server: Server
    half: bool
    probes: int | None = None
    remembered: MixtureConfig | None = None

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries, see `Store.search`."""
        neighbours = min(neighbours, self.manifest.count or 0)
        distances = torch.full((len(queries), neighbours), torch.inf)
        values = torch.zeros(len(queries), neighbours, dtype=torch.long)
        vectors = queries.detach().cpu().numpy().astype(np.float16 if self.half else np.float32)
        step = max(1, ANSWERED // neighbours)
        for start in range(0, len(queries), step):
            for row, hits in enumerate(self._hits(vectors[start : start + step], neighbours), start):
                ranked = sorted((hit["distance"], hit["entity"][VALUE]) for hit in hits)
                distances[row, : len(ranked)] = torch.tensor([distance for distance, _ in ranked])
                values[row, : len(ranked)] = torch.tensor([value for _, value in ranked])
        return Neighbours(distances.to(queries.device), values.to(queries.device))

    def _hits(self, vectors: np.ndarray, neighbours: int) -> Any:
        options = {} if self.probes is None else {"nprobe": self.probes}
        return self.server.call(
            "search",
            collection_name=self.server.address.collection,
            data=list(vectors),
            limit=neighbours,
            anns_field=KEY,
            search_params={"metric_type": "L2", "params": options},
            output_fields=[VALUE],
        )

    def mixture(self) -> MixtureConfig | None:
        """Return the saved mixture, see `Store.mixture`."""
        return self.remembered

    def keep_mixture(self, config: MixtureConfig) -> None:
        """Save the mixture, see `Store.keep_mixture`."""
        self.server.write(MIXTURE_ROW, config.to_dict())


def open_in_milvus(address: Address, search: Search = "auto") -> MilvusStore:
    """Open the store at `address`; raises `InputError` if it cannot be used."""
    server = Server(address)
    rows = server.rows()
    if MANIFEST_ROW not in rows:
        raise InputError(f"{address}: no such datastore; build it with polyformer datastore build")
    manifest = Manifest.parsed(rows[MANIFEST_ROW], address)
    parts = range(1, manifest.parts + 1)
    left = [part for part in parts if not rows.get(part, {}).get("finished")]
    if left:
        raise InputError(f"{address}: not finished (parts {left} of {manifest.parts}); resume its build")
    count = sum(rows[part]["entries"] for part in parts)
    server.call("load_collection", collection_name=address.collection)
    present = server.call(
        "query",
        collection_name=address.collection,
        filter="",
        output_fields=["count(*)"],
        consistency_level="Strong",
    )[0]["count(*)"]
    if present != count:
        raise InputError(f"{address}: expected {count:,} entries, got {present:,}; build the store again")
    half = key_type(server) == server.pymilvus.DataType.FLOAT16_VECTOR
    probes = rows.get(INDEX_ROW, {}).get("probes")
    if search == "index" and probes is None:
        raise InputError(f"{address}: it has no index; make it with polyformer datastore index {address}")
    if search == "flat" and probes is not None:
        probes = rows[INDEX_ROW]["lists"]
    mixture = MixtureConfig.from_dict(rows[MIXTURE_ROW]) if MIXTURE_ROW in rows else None
    whole = dataclasses.replace(manifest, parts=1, count=count)
    return MilvusStore(whole, server, half, probes, mixture)


def index_in_milvus(store: MilvusStore, lists: int | None, recall: float, neighbours: int) -> tuple[int, int]:
    """Build an index of `lists` lists, by default 4 sqrt(entries); return the numbers of lists and of probes.

    Probes are the scanned lists: the fewest, a power of 2, that find the share `recall` of the neighbours of
    a sample of the keys.
    """
    server, count = store.server, store.manifest.count or 1
    name, lists = server.address.collection, lists or max(1, round(4 * math.sqrt(count)))
    lists = max(1, min(lists, count // 39))
    server.write(INDEX_ROW, {})  # invalid until the new index exists
    server.call("release_collection", collection_name=name)
    server.call("drop_index", collection_name=name, index_name=KEY)
    index = server.client.prepare_index_params()
    index.add_index(KEY, index_type="IVF_FLAT", metric_type="L2", params={"nlist": lists})
    server.call("create_index", collection_name=name, index_params=index)
    server.call("load_collection", collection_name=name)
    numbers = np.linspace(0, count - 1, min(QUERIES, count)).astype(int).tolist()
    rows = server.call("get", collection_name=name, ids=numbers, output_fields=[KEY])
    queries = torch.from_numpy(np.stack([vector(row[KEY]) for row in rows]))
    exact = dataclasses.replace(store, probes=lists).search(queries, neighbours).distances[:, -1:]
    probes = 1
    while probes < lists:
        near = dataclasses.replace(store, probes=probes).search(queries, neighbours).distances
        if float((near <= exact).float().mean()) >= recall:
            break
        probes *= 2
    server.write(INDEX_ROW, {"lists": lists, "probes": min(probes, lists)})
    return lists, min(probes, lists)


def vector(value: Any) -> np.ndarray:
    """Convert a key from the client's format: numbers, or the bytes of half-precision numbers."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes):
        value = value[0]
    if isinstance(value, bytes):
        return np.frombuffer(value, np.float16).astype(np.float32)
    return np.asarray(value, np.float32)
