"""Checkpoints written by the training process itself, or by a thread of it while training goes on.

The thread writes a copy of weights and optimizer memory, on the CPU. One checkpoint is under way at a time:
the next waits for it, as do an interruption and the end of training. It gets its name, and older ones go,
when all of it is on the disk, as ever. Processes that share a model speak of it in a group of their own, so
that what they say does not come between the exchanges of training.
"""

import threading
from datetime import timedelta
from types import TracebackType
from typing import Self

from torch.distributed import ProcessGroup

from polyformer.core.errors import InputError
from polyformer.training.checkpoint import Checkpoints, Snapshot
from polyformer.training.signals import Interrupted


class Writer:
    """Writes the checkpoints of a run. As a context it leaves when the last of them is written.

    background: write in a thread. group: the processes that share the model, of which each writes its parts;
    None where one has all of it.
    """

    def __init__(self, checkpoints: Checkpoints, background: bool, group: ProcessGroup | None) -> None:
        self.checkpoints, self.background, self.group = checkpoints, background, group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, or begin to. Raises what the one before failed with, if it did."""
        self.wait()
        if not self.background:
            self.checkpoints.write(snapshot, self.group)
            return
        # A daemon, so that a second Ctrl-C stops at once.
        self._thread = threading.Thread(target=self._write, args=(snapshot.copied(),), daemon=True)
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.checkpoints.write(snapshot, self.group)
        except Exception as error:  # to be raised where training can hear it
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether the checkpoint under way could not be written: `wait` raises why."""
        return self._error is not None

    def wait(self) -> None:
        """Return when the checkpoint under way is written; raises what it failed with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def raise_failure(self) -> None:
        """What a process does when it hears that a checkpoint could not be written, by itself or another."""
        self.wait()
        raise InputError("another process of this run could not write its checkpoint: look at what it said")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Interrupted):
            self.wait()
        elif not isinstance(error, KeyboardInterrupt) and self._thread is not None:
            self._thread.join()  # what stopped training is the news, and no half checkpoint stays


def writers(timeout: float | None) -> ProcessGroup:
    """A new group of all processes, on their CPUs, for `Writer`; every process calls it.

    timeout: seconds that they wait for one another; None torch's.
    """
    import torch.distributed as dist

    wait = None if timeout is None else timedelta(seconds=timeout)
    group = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(group, ProcessGroup)
    return group
