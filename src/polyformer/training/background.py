"""Checkpoint writing in the training process, either synchronously or in a background thread.

The thread writes a copy of the weights and the optimizer state in CPU memory. Only one checkpoint is
written at once: the next checkpoint, an interruption and the end of training wait for it. As in synchronous
writing, the folder gets its name, and older checkpoints are removed, only when all files are on the disk.
Processes that share a model use a separate process group for checkpoints, so that its messages do not mix
with the collectives of training.
"""

import threading
from datetime import timedelta
from types import TracebackType
from typing import Self

from torch.distributed import ProcessGroup

from polyformer.core.errors import InputError
from polyformer.training.checkpoint import Checkpoints, Snapshot
from polyformer.training.signals import Interrupted


class CheckpointWriter:
    """A writer of the checkpoints of a run. Leaving its context waits for the last checkpoint.

    background: write in a thread. group: the processes that share the model, where each writes its shards;
    None if a single process has the whole model.
    """

    def __init__(self, checkpoints: Checkpoints, background: bool, group: ProcessGroup | None) -> None:
        self.checkpoints, self.background, self.group = checkpoints, background, group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, or start to. Raises the error of the previous checkpoint, if it failed."""
        self.wait()
        if not self.background:
            self.checkpoints.write(snapshot, self.group)
            return
        # A daemon thread, so that a second Ctrl-C stops the program immediately.
        self._thread = threading.Thread(target=self._write, args=(snapshot.copy_to_cpu(),), daemon=True)
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.checkpoints.write(snapshot, self.group)
        except Exception as error:  # raised later, in the training thread
            self._error = error

    @property
    def failed(self) -> bool:
        """Return whether the checkpoint in progress could not be written; `wait` raises the reason."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written. Raises its error, once, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def raise_failure(self) -> None:
        """Raise the error of a checkpoint that failed in this process or in another process."""
        self.wait()
        raise InputError(
            "another process of this run could not write its checkpoint; see its output for the reason"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Interrupted):
            self.wait()
        elif not isinstance(error, KeyboardInterrupt) and self._thread is not None:
            self._thread.join()  # report the error of training; do not leave a partial checkpoint


def checkpoint_group(timeout: float | None) -> ProcessGroup:
    """Create a gloo group of all processes, on the CPU, for `CheckpointWriter`. Collective: every process
    calls it.

    timeout: seconds that the processes wait for each other; None uses the default of torch.
    """
    import torch.distributed as dist

    wait = None if timeout is None else timedelta(seconds=timeout)
    group = dist.new_group(backend="gloo", timeout=wait)
    assert isinstance(group, ProcessGroup)
    return group
