"""A Milvus server as a place for stores: calls with a time limit, and its errors in the words of ours.

Every call ends within some `TIMEOUT` seconds, the first within `CONNECT`. While a server is away or says that
it is asked too much, it is asked again, by pymilvus after a longer wait each time (that is the back-pressure:
one batch is under way at a time); what it has not answered then is an `InputError`. Calls may so be made
twice; all that write do so by primary key.
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

from polyformer.core.errors import InputError
from polyformer.datastore.manifest import MANIFEST

TIMEOUT, CONNECT = 60.0, 20.0
SERVER = re.compile(r"(?P<uri>(https?|tcp)://[^/]+)(/(?P<name>\w+))?/?")
FILE = re.compile(r"(?P<uri>.+\.db)(/(?P<name>\w+))?")
TOKEN = "MILVUS_TOKEN"
NO_CONNECTION = 2  # pymilvus's Status.CONNECT_FAILED

ROW, CONTENT, UNUSED = "row", "content", "unused"
LAST_ROW = -9
"""Rows of plain data are from here on; those below are leases (`milvus_lease`)."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a store lies: a server's URI, or the file of an embedded one, and the name of its collection."""

    uri: str
    collection: str

    @classmethod
    def of(cls, name: str) -> "Address | None":
        """`http://HOST:19530/COLLECTION` or `FILE.db/COLLECTION`; None for the name of a folder."""
        match = SERVER.fullmatch(name)
        if match is None and not (Path(name) / MANIFEST).exists():
            match = FILE.fullmatch(name)
        return None if match is None else cls(match["uri"], match["name"] or "polyformer")

    def __str__(self) -> str:
        return f"{self.uri}/{self.collection}"


class Server:
    """A connection. `call` makes any call of pymilvus's client; rows of plain data lie beside entries."""

    def __init__(self, address: Address):
        self.address, self.about = address, f"{address.collection}_about"
        try:
            import pymilvus
        except ImportError as error:
            raise InputError(f"{address}: needs pymilvus: pip install polyformer[datastore]") from error
        for name in ("pymilvus", "grpc._server", "milvus_lite"):  # the latter two the embedded server's
            logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are ours to say, in one line
        self.pymilvus = pymilvus
        options = {"token": token} if (token := os.environ.get(TOKEN)) else {}
        connect = functools.partial(pymilvus.MilvusClient, uri=address.uri, timeout=CONNECT, **options)
        with self.errors():
            self.client: Any = self._patiently(connect, CONNECT)

    def _patiently(self, call: Callable[[], Any], seconds: float) -> Any:
        """What `call` gives, which is made again where there is no connection: a server may be starting."""
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
        """What goes wrong inside becomes an `InputError`."""
        import grpc

        try:
            yield
        except (self.pymilvus.MilvusException, grpc.RpcError, OSError, ConnectionError) as error:
            reason = " ".join(str(getattr(error, "message", None) or error).split())
            if "Open local milvus failed" in reason and Path(self.address.uri).exists():
                raise InputError(
                    f"{self.address.uri}: cannot be opened: another process has it, for the embedded server "
                    "lets one in at a time, or it is damaged"
                ) from error
            raise InputError(
                f"{self.address.uri}: the Milvus server does not do it ({reason[:200]}); see that it runs, "
                "then go on by the same command: what it had confirmed is kept"
            ) from error

    def call(self, name: str, seconds: float | None = None, **arguments: Any) -> Any:
        """One call, made for so many `seconds`, by default `TIMEOUT`; see the module."""
        seconds = TIMEOUT if seconds is None else seconds
        with self.errors():
            call = functools.partial(getattr(self.client, name), timeout=seconds, **arguments)
            return self._patiently(call, seconds)

    def has(self, collection: str) -> bool:
        """Whether there is such a collection."""
        return bool(self.call("has_collection", collection_name=collection))

    def create_about(self) -> None:
        """The collection with rows of plain data, unless it is there."""
        if self.has(self.about):
            return
        types = self.pymilvus.DataType
        schema = self.client.create_schema(auto_id=False)
        schema.add_field(ROW, types.INT64, is_primary=True)
        schema.add_field(CONTENT, types.VARCHAR, max_length=60_000)
        schema.add_field(UNUSED, types.FLOAT_VECTOR, dim=2)  # no collection is without vectors
        index = self.client.prepare_index_params()
        index.add_index(UNUSED, index_type="FLAT", metric_type="L2")
        try:
            self.call("create_collection", collection_name=self.about, schema=schema, index_params=index)
        except InputError:
            if not self.has(self.about):  # another process has made it meanwhile
                raise

    def write(self, row: int, content: dict[str, Any]) -> None:
        """Keep plain data as a row; an older one is replaced."""
        rows = [{ROW: row, CONTENT: json.dumps(content), UNUSED: [0.0, 0.0]}]
        self.call("upsert", collection_name=self.about, data=rows)

    def remove(self, row: int) -> None:
        """No longer keep a row, if it is there."""
        self.call("delete", seconds=CONNECT, collection_name=self.about, ids=[row])

    def rows(self) -> dict[int, dict[str, Any]]:
        """All rows of plain data; `InputError` where they cannot be read."""
        return self._rows(f"{ROW} >= {LAST_ROW}")

    def leases(self) -> dict[int, dict[str, Any]]:
        """The rows of processes that build."""
        return self._rows(f"{ROW} < {LAST_ROW}")

    def _rows(self, which: str) -> dict[int, dict[str, Any]]:
        if not self.has(self.about):
            return {}
        self.call("load_collection", collection_name=self.about)
        stored = self.call(
            "query",
            collection_name=self.about,
            filter=which,
            output_fields=[ROW, CONTENT],
            limit=16_384,
            consistency_level="Strong",
        )
        try:
            return {int(row[ROW]): dict(json.loads(row[CONTENT])) for row in stored}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.address}: its rows are damaged; build the store again") from error
