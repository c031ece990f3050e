"""Checkpoints of a run as they are written: complete or absent, and sufficient for an exact resume.

OUT/checkpoints/step-00000100/model.safetensors       weights and buffers, under the names in the model
                              optimizer.safetensors   NAME/exp_avg, ...: the optimizer's tensors by parameter
                              memory.safetensors      the memory of the last batches, for a recurrent model
                              state.json              progress of the run, checksums, versions, machine, and
                                                        the tuning choices used

`polyformer.training.restore` reads them, and `polyformer.training.distributed.sharded_files` writes those of
sharded models.
"""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_directory, remove_directory, remove_partials, save_tensors
from polyformer.training.run_control import Interrupted
from polyformer.training.state import MODEL, OPTIMIZER, PREFIX, Snapshot

CHECKPOINTS = "checkpoints"


class Checkpoints:
    """The checkpoints of the run in `run`; only the first process of a run writes."""

    def __init__(self, run: Path, every: int = 1, keep: int = 1) -> None:
        self.folder, self.every, self.keep = run / CHECKPOINTS, every, keep

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in order."""
        names = [path.name.removeprefix(PREFIX) for path in self.folder.glob(f"{PREFIX}*")]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, which may not exist."""
        return self.folder / f"{PREFIX}{step:08d}"

    def latest(self) -> Path | None:
        """Return the last complete checkpoint, or None if there is none yet."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def choose(self, step: int | None) -> Path | None:
        """Return the checkpoint of `step`, by default the last, or None if there is none yet.

        Raises `InputError` for a `step` without a checkpoint.
        """
        if step is None:
            return self.latest()
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise InputError(f"from_step: {self.folder} has no checkpoint of step {step}; it has {there}")
        return self.path(step)

    def regular(self) -> list[Path]:
        """Return the last `keep` checkpoints at regular intervals, including the latest of all.

        A checkpoint saved only because it was the best is not included.
        """
        steps = self.steps()
        return [self.path(step) for step in steps if step % self.every == 0 or step == steps[-1]][
            -self.keep :
        ]

    def write(self, snapshot: Snapshot) -> None:
        """Write the checkpoint of `snapshot`, then remove the checkpoints that are no longer needed.

        The folder gets its name at the end, so that the checkpoint is either complete or absent.
        """
        with atomic_directory(self.path(snapshot.progress.step)) as folder:
            save_tensors(folder / MODEL, snapshot.weights)
            save_tensors(folder / OPTIMIZER, snapshot.optimizer)
            snapshot.write_rest(folder)
        self.prune(snapshot.progress.best_step)

    def prune(self, best_step: int | None) -> None:
        """Remove all checkpoints except the regular and the best, and partial files of killed writers."""
        remove_partials(self.folder)
        kept = {*self.regular(), self.path(best_step) if best_step is not None else None}
        for step in self.steps():
            if self.path(step) not in kept:
                remove_directory(self.path(step))

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints after `step`, the last first, so that the latest is always valid."""
        for later in reversed(self.steps()):
            if later > step:
                remove_directory(self.path(later))


class CheckpointWriter:
    """A writer of the checkpoints of a run, as a context manager around the steps of training."""

    failed: bool = False
    """Whether the checkpoint in progress could not be written; `wait` raises the reason."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def write(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, or start to. Raises the error of the previous checkpoint, if it failed."""
        self.checkpoints.write(snapshot)

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written. Raises its error, once, if it failed."""

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
        pass


class BackgroundWriter(CheckpointWriter):
    """A writer in a background thread.

    The thread writes a copy of the weights and the optimizer state in CPU memory, and only one checkpoint at
    once: the next checkpoint, an interruption and the end of training (leaving the context) wait for it.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        super().__init__(checkpoints)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Start to write a checkpoint. Raises the error of the previous checkpoint, if it failed."""
        self.wait()
        # A daemon thread, so that a second Ctrl-C stops the program immediately.
        self._thread = threading.Thread(target=self._write, args=(snapshot.copy_to_cpu(),), daemon=True)
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.checkpoints.write(snapshot)
        except Exception as error:  # raised later, in the training thread
            self._error, self.failed = error, True

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error, self.failed = self._error, None, False
        if error is not None:
            raise error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Interrupted):
            self.wait()
        elif not isinstance(error, KeyboardInterrupt) and self._thread is not None:
            self._thread.join()  # report the error of training; do not leave a partial checkpoint


def open_writer(checkpoints: Checkpoints, background: bool) -> CheckpointWriter:
    """Return the writer of `checkpoints`, in this thread or in the background."""
    return BackgroundWriter(checkpoints) if background else CheckpointWriter(checkpoints)
