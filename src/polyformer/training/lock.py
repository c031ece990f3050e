"""One writer at a time in the folder of a run.

The lock is the kernel's (flock, taken by `filelock`) on RUN/.lock. It ends with its process, however that
ends, so nothing is stale after a crash. On NFS Linux asks the server for it: it then holds between machines
too, and after the crash of a whole machine the server drops it when that machine's lease runs out. On a file
system without kernel locks a marker, RUN/.lock.marker, with the process's number, host and start takes its
place: a dead process of this host is recognized, one of another host cannot be.

What .lock holds is for messages alone. The file of a run stays; `filelock` sees whether the one that it has
locked was removed meanwhile.
"""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from polyformer.core.errors import InputError
from polyformer.core.files import writing

LOCK, MARKER = ".lock", ".lock.marker"
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@contextmanager
def sole_writer(folder: Path, stopped: str = "on SIGTERM it saves a checkpoint first") -> Iterator[None]:
    """Holds the lock of `folder`, which is made if need be; `InputError` where another process has it.

    `stopped`: what to know of a process that is stopped.

    A body that ends in an error leaves the lock's file as it was, and no new folder that is empty.
    """
    file = folder / LOCK
    with writing(file):
        new_folder, new_file = not folder.exists(), not file.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(folder, stopped)
        try:
            before = file.read_bytes()
            file.write_bytes(_holder())
        except BaseException:
            lock.release()
            raise
    try:
        yield
        file.write_bytes(b"")
    except BaseException:
        with suppress(OSError):  # what went wrong in the body is to be heard
            if new_file:
                file.unlink()
            else:
                file.write_bytes(before)
            if new_folder:
                folder.rmdir()  # only where it is empty
        raise
    finally:
        lock.release()


def _acquire(folder: Path, stopped: str) -> BaseFileLock:
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
        return lock
    except Timeout as error:
        raise InputError(_in_use(folder, stopped)) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    (folder / LOCK).touch()
    marker = SoftFileLock(folder / MARKER, timeout=1)  # a second try, after a dead process's was removed
    try:
        marker.acquire()
    except Timeout as error:
        raise InputError(
            f"{_in_use(folder, stopped)}; if it no longer runs, remove {folder / MARKER}"
        ) from error
    return marker


def _holder() -> bytes:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}).encode()


def _in_use(folder: Path, stopped: str) -> str:
    try:
        holder = json.loads((folder / LOCK).read_bytes())
        who = f"process {holder['process']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"{folder}: in use by {who}; wait until it ends, or stop it ({stopped})"
