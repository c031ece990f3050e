"""A lease that allows only a single builder per part of a store, on a server without locks.

A builder keeps a row among the plain data of the collection and changes it every `BEAT` seconds. A new
builder first adds its own row and only then looks for others: if two start at once, at least one of them sees
the other; builders that see another remove their rows and try again a little later. A row that changes while
it is watched belongs to a living process, which is an error. A row that does not change for `LEASE` seconds
belongs to a dead process and is removed. No clocks are compared. A builder that was suspended for that long
finds its row removed before it can commit anything.
"""

import contextlib
import hashlib
import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from polyformer.applications.retrieval.manifest import Manifest
from polyformer.applications.retrieval.milvus_server import LAST_ROW, Server
from polyformer.core.errors import InputError

BEAT, LEASE = 5.0, 30.0
"""Seconds between two heartbeats, and seconds without a heartbeat until a builder counts as dead."""

PAUSE = 1.0  # mean seconds between two looks at other builders


class Lease:
    """The row of a process that builds the part that `manifest` describes."""

    def __init__(self, server: Server, manifest: Manifest):
        self.server, self.row = server, 0
        # Parts of the same build may run at once; any other build of the collection excludes them.
        described = {**manifest.to_dict(), "part": 0, "count": None}
        self.about: dict[str, Any] = {
            "build": hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
            "part": manifest.part,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "beat": 0,
        }
        self.ended = threading.Event()
        self.sure_from = time.monotonic()
        """When the last heartbeat that surely arrived in time was sent."""

    def acquire(self) -> None:
        """Wait until rows of dead builders are removed; raises `InputError` if another builder is alive."""
        seen: dict[int, tuple[dict[str, Any], float]] = {}
        while True:
            self.row = LAST_ROW - 1 - secrets.randbits(48)
            self.sure_from = time.monotonic()
            self.server.write(self.row, self.about)
            others = self._others()
            if not others:
                return
            self.release()
            for row, about in others.items():
                first, since = seen.setdefault(row, (about, time.monotonic()))
                if about != first:
                    raise InputError(
                        f"{self.server.address}: in use by process {about['process']} on {about['host']} "
                        f"(since {about['since']}); wait until it ends, or stop it (the same command "
                        "resumes it later)"
                    )
                if time.monotonic() - since > LEASE:
                    self.server.remove(row)
            # random, so that two builders that started at once separate
            time.sleep(PAUSE * random.uniform(0.5, 1.5))

    def release(self) -> None:
        """Remove the row; if the server is unreachable, the lease expires instead."""
        with contextlib.suppress(InputError):
            self.server.remove(self.row)

    def check(self) -> None:
        """Raise `InputError` if another process may have taken over, so that this process commits nothing."""
        if self._expired() or self.row not in self.server.leases():
            raise InputError(
                f"{self.server.address}: another process builds it, for this one gave no sign of life in "
                f"{LEASE:g} seconds; what it had confirmed is kept"
            )

    def beat(self) -> None:
        """Send heartbeats until `ended`, in a separate thread, because the model may compute for long."""
        while not self.ended.wait(BEAT):
            with contextlib.suppress(InputError):  # the builder's own calls report the error
                sent = time.monotonic()
                if self._expired() or self.row not in self.server.leases():
                    return
                self.about = {**self.about, "beat": self.about["beat"] + 1}
                self.server.write(self.row, self.about)
                if self._expired():  # suspended during the call, which may have restored a removed row
                    self.release()
                    return
                self.sure_from = sent

    def _expired(self) -> bool:
        """Whether others may have seen no heartbeat for `LEASE` seconds; never false again once true."""
        return time.monotonic() - self.sure_from > LEASE

    def _others(self) -> dict[int, dict[str, Any]]:
        """Return the rows of builders that exclude this builder."""
        return {
            row: about
            for row, about in self.server.leases().items()
            if row != self.row
            and (about.get("build") != self.about["build"] or about.get("part") == self.about["part"])
        }


@contextlib.contextmanager
def held(server: Server, manifest: Manifest) -> Iterator[Lease]:
    """Hold the lease of the part of `manifest`; raises `InputError` if a living process holds it."""
    lease = Lease(server, manifest)
    lease.acquire()
    thread = threading.Thread(target=lease.beat, daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        lease.ended.set()
        thread.join()
        lease.release()
