"""A connection to a Milvus server that stores entries: calls have a time limit, and errors are `InputError`.

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
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyformer.applications.retrieval.manifest import MANIFEST
from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra

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
