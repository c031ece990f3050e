"""A lock that allows only a single writer in the folder of a run.

The lock is a kernel lock (flock, through `filelock`) on RUN/.lock. It ends with its process in any case, so
that no stale lock remains after a crash. On NFS, Linux requests the lock from the server: it then works
across machines, and after the crash of a whole machine the server drops it when the lease of the machine
expires. On a file system without kernel locks a marker file RUN/.lock.marker, with the process id, host and
start time, is used instead: a dead process of this host is detected, a dead process of another host cannot
be.

The content of .lock is used only for messages. The lock file of a run is kept; `filelock` detects whether the
locked file was removed in the meantime.
"""

import errno
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from polyformer.core.errors import InputError
from polyformer.core.files import writing
from polyformer.core.paths import kind_of, links_out_of

LOCK, MARKED = ".lock", ".marker"
MARKER = LOCK + MARKED
TRIES = 20  # within a second, to read the holder of the lock
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@contextmanager
def sole_writer(
    folder: Path, stopped: str = "on SIGTERM it saves a checkpoint first", name: str = LOCK, kept: bool = True
) -> Iterator[None]:
    """Hold the lock of `folder`, which is created if needed; raise `InputError` if another process holds it.

    `stopped` describes, for messages, the behavior of a stopped process. `name` is the lock file, for a
    folder with several locks. `kept`: keep the file at the end.

    Raises `InputError` too for a link in the folder to a folder elsewhere, where the body would write and
    remove files of others. A body that fails leaves the lock file unchanged, and no new empty folder.
    """
    file = folder / name
    _refuse_linked_folders(folder)
    with writing(file):
        new_folder, new_file = not folder.exists(), not file.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(file, stopped)
        try:
            before = file.read_bytes()
            file.write_bytes(_holder())
        except BaseException:
            lock.release()
            raise
    try:
        yield
        if kept:
            file.write_bytes(b"")
        else:
            file.unlink(missing_ok=True)
    except BaseException:
        with suppress(OSError):  # the error of the body has priority
            if new_file:
                file.unlink()
            else:
                file.write_bytes(before)
            if new_folder:
                folder.rmdir()  # only where it is empty
        raise
    finally:
        lock.release()


def _refuse_linked_folders(folder: Path) -> None:
    for link in links_out_of(folder):
        if link.is_dir():
            raise InputError(
                f"{link} is a link to a folder outside of {folder}; put the folder itself there, or link the "
                "whole folder"
            )


def check_lock_file(file: Path) -> None:
    """Raise `InputError` if `file` is not a regular file: reading a FIFO blocks, a link points elsewhere."""
    with suppress(FileNotFoundError):
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{file}: expected a file, which is locked, got {kind_of(status)}; remove it")


def _acquire(file: Path, stopped: str) -> BaseFileLock:
    marker_file = file.with_name(f"{file.name}{MARKED}")
    for path in (file, marker_file):
        check_lock_file(path)
    lock = FileLock(file, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
        return lock
    except Timeout as error:
        raise InputError(_in_use(file, stopped)) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    file.touch()
    marker = SoftFileLock(marker_file, timeout=1)  # allows a second try after a stale marker was removed
    try:
        marker.acquire()
    except Timeout as error:
        raise InputError(f"{_in_use(file, stopped)}; if it no longer runs, remove {marker_file}") from error
    return marker


def _holder() -> bytes:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}).encode()


def _in_use(file: Path, stopped: str) -> str:
    """Return the message that names the holder, which writes its id after acquiring the lock."""
    who = "another process"
    for _ in range(TRIES):
        try:
            holder = json.loads(file.read_bytes())
            who = f"process {holder['process']} on {holder['host']} (since {holder['since']})"
            break
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(1 / TRIES)
    return f"{file.parent}: in use by {who}; wait until it ends, or stop it ({stopped})"
