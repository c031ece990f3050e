"""What a run has to do with other programs: signals that request a checkpoint, and a lock on its folder.

Signals are handled at the end of the current step. SIGINT (Ctrl-C) and SIGTERM (for example from a cluster
that reclaims the machine): write a checkpoint and stop. A second SIGINT stops immediately. SIGUSR1 (an early
warning of a cluster, such as Slurm's --signal=USR1@120): write a checkpoint and continue, to use the
remaining time; the SIGTERM that follows writes another checkpoint.

The lock allows only a single writer in the folder of a run. It is a kernel lock (flock, through `filelock`)
on RUN/.lock. It ends with its process in any case, so that no stale lock remains after a crash. On NFS, Linux
requests the lock from the server: it then works across machines, and after the crash of a whole machine the
server drops it when the lease of the machine expires. On a file system without kernel locks a marker file
RUN/.lock.marker, with the process id, host and start time, is used instead: a dead process of this host is
detected, a dead process of another host cannot be.

The content of .lock is used only for messages. The lock file of a run is kept; `filelock` detects whether the
locked file was removed in the meantime.
"""

import errno
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from polyformer.core.errors import InputError
from polyformer.core.files import writing
from polyformer.core.paths import kind_of, links_out_of

STOP = (signal.SIGINT, signal.SIGTERM)
WARNING = getattr(signal, "SIGUSR1", None)  # Windows has none


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing, as a signal handler; unlike SIG_IGN it is not inherited by child processes."""


DEFAULTS = (signal.SIG_DFL, signal.default_int_handler, ignore)


class Interrupted(KeyboardInterrupt):
    """The exception for a run that a signal stopped after `step`; the checkpoint of `step` is written."""

    def __init__(self, number: int, step: int) -> None:
        self.signal, self.step = signal.Signals(number), step
        super().__init__(f"stopped by {self.signal.name} at step {step}, of which a checkpoint is written")


@dataclass(frozen=True)
class SignalRequests:
    """The requests of signals: `stop` the run, by the number of the signal or 0; `save` a checkpoint now.

    failed: whether a checkpoint could not be written in the background; processes share it with the requests.
    """

    stop: int = 0
    save: bool = False
    failed: bool = False


class Signals:
    """A context that records signals instead of terminating. Handlers set by the program are kept.

    Only the main thread of a program can handle signals; in any other thread this does nothing.
    """

    def __init__(self) -> None:
        self.asked = SignalRequests()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP, *((WARNING,) if WARNING else ())):
                if signal.getsignal(number) in DEFAULTS:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> SignalRequests:
        """Return the requests so far; a request for a checkpoint is returned only once."""
        asked, self.asked = self.asked, SignalRequests(self.asked.stop)
        return asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == WARNING:
            self.asked = SignalRequests(self.asked.stop, save=True)
            return
        if number == signal.SIGINT and self.asked.stop == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = SignalRequests(number, self.asked.save)
        name = signal.Signals(number).name
        # os.write instead of print, because the signal may have interrupted a print.
        again = " (again to stop immediately)" if number == signal.SIGINT else ""
        with suppress(OSError):
            os.write(2, f"\npolyformer: {name}: stopping after this step{again}\n".encode())


@contextmanager
def ignore_sigusr1() -> Iterator[None]:
    """Ignore SIGUSR1 while data are read or results are written, because there is no progress to save."""
    main = threading.current_thread() is threading.main_thread()
    if WARNING is None or not main or signal.getsignal(WARNING) is not signal.SIG_DFL:
        yield
        return
    before = signal.signal(WARNING, ignore)
    try:
        yield
    finally:
        signal.signal(WARNING, before)


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
