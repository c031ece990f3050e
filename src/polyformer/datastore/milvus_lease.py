"""One builder at a time of a part of a store on a server, which has no locks.

Who builds keeps a row among the plain data of the collection and changes it every `BEAT` seconds. Who wants
to build adds a row of its own, and only then looks for others: of two that come at once one sees the other,
or both do; then they take their rows back and try again a little later. A row that changes while it is looked
at is of a living process: an error. One that does not change for `LEASE` seconds is of a dead one, and is
removed. No clocks are compared. Who wakes up after so long finds its row gone before anything of its counts.
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

from polyformer.core.errors import InputError
from polyformer.datastore.manifest import Manifest
from polyformer.datastore.milvus_server import LAST_ROW, Server

BEAT, LEASE = 5.0, 30.0
"""Seconds between two signs of life, and without one until a builder counts as dead."""

PAUSE = 1.0
"""About so many seconds between two looks at others."""


class Lease:
    """The row of a process that builds the part that `manifest` describes."""

    def __init__(self, server: Server, manifest: Manifest):
        self.server, self.row = server, 0
        # Parts of one build are built at once; what else goes into the collection excludes them all.
        described = {**manifest.to_dict(), "part": 0, "count": None}
        self.about: dict[str, Any] = {
            "build": hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
            "part": manifest.part,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "beat": 0,
        }
        self.ended, self.lost = threading.Event(), False

    def acquire(self) -> None:
        """Wait until dead builders' rows are gone; `InputError` where one lives."""
        seen: dict[int, tuple[dict[str, Any], float]] = {}
        while True:
            self.row = LAST_ROW - 1 - secrets.randbits(48)
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
                        f"(since {about['since']}); wait until it ends, or stop it (it goes on later by the "
                        "same command)"
                    )
                if time.monotonic() - since > LEASE:
                    self.server.remove(row)
            time.sleep(PAUSE * random.uniform(0.5, 1.5))  # two that met part

    def release(self) -> None:
        """Take the row back, unless the server is away: then it counts as dead by and by."""
        with contextlib.suppress(InputError):
            self.server.remove(self.row)

    def check(self) -> None:
        """Raises `InputError` where another process has taken over: nothing more of this one may count."""
        if self.lost or self.row not in self.server.leases():
            raise InputError(
                f"{self.server.address}: another process builds it, for this one gave no sign of life in "
                f"{LEASE:g} seconds; what it had confirmed is kept"
            )

    def beat(self) -> None:
        """Show life until `ended`; of a thread of its own, for the model may read for long."""
        last = time.monotonic()
        while not self.ended.wait(BEAT):
            with contextlib.suppress(InputError):  # the builder's own calls say what is wrong
                if time.monotonic() - last > LEASE or self.row not in self.server.leases():
                    self.lost = True
                    return
                self.about = {**self.about, "beat": self.about["beat"] + 1}
                self.server.write(self.row, self.about)
                last = time.monotonic()

    def _others(self) -> dict[int, dict[str, Any]]:
        """The rows of builders that exclude this one."""
        return {
            row: about
            for row, about in self.server.leases().items()
            if row != self.row
            and (about.get("build") != self.about["build"] or about.get("part") == self.about["part"])
        }


@contextlib.contextmanager
def held(server: Server, manifest: Manifest) -> Iterator[Lease]:
    """The lease of the part that `manifest` describes; `InputError` where a living process has it."""
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
