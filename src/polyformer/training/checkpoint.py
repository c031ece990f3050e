"""Checkpoints of a run: complete or absent, sufficient for an exact resume, and verified when read.

OUT/checkpoints/step-00000100/model.safetensors       weights and buffers, under the names in the model
                              optimizer.safetensors   NAME/exp_avg, ...: the optimizer's tensors by parameter
                              memory.safetensors      the memory of the last batches, for a recurrent model
                              state.json              progress of the run, checksums, versions, machine, and
                                                        the tuning choices used
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup

from polyformer.core.errors import InputError
from polyformer.core.files import (
    atomic_directory,
    read_tensors,
    remove_directory,
    remove_partials,
    save_tensors,
    tied_names,
    writing,
)
from polyformer.training.signals import Interrupted
from polyformer.training.state import (
    MEMORY,
    MODEL,
    OPTIMIZER,
    PREFIX,
    FormatError,
    Snapshot,
    file_digest,
    has_parts,
    read_state,
    set_optimizer_state,
    step_of,
)
from polyformer.training.state_files import state_of

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

    def write(self, snapshot: Snapshot, group: ProcessGroup | None = None) -> None:
        """Write the checkpoint of `snapshot`, then remove the checkpoints that are no longer needed.

        For a sharded model, every process of `group` calls this and writes its shards. The first process
        creates the folder. When all shards are written, it writes the state and renames the folder, so that
        the checkpoint is either complete or absent.
        """
        if group is not None:
            from polyformer.training.distributed.sharded_files import shared_errors

            with shared_errors(group):
                self._write_parts(snapshot, group)
            return
        with atomic_directory(self.path(snapshot.progress.step)) as folder:
            save_tensors(folder / MODEL, snapshot.weights)
            save_tensors(folder / OPTIMIZER, snapshot.optimizer)
            snapshot.write_rest(folder)
        self.prune(snapshot.progress.best_step)

    def _write_parts(self, snapshot: Snapshot, group: ProcessGroup) -> None:
        from polyformer.training.distributed.sharded_files import broadcast_path, shared_errors
        from polyformer.training.sharded_checkpoint import write_sharded

        first, path = torch.distributed.get_rank() == 0, self.path(snapshot.progress.step)
        with ExitStack() as opened:
            folder = None
            with shared_errors(group):
                folder = opened.enter_context(atomic_directory(path)) if first else None
            folder = broadcast_path(folder, group)
            with writing(path):
                digests = write_sharded(folder, snapshot.weights, snapshot.optimizer, group)
            if first:
                snapshot.write_rest(folder, digests)
        if first:
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
    """A writer of the checkpoints of a run, synchronously or in a background thread.

    The thread writes a copy of the weights and the optimizer state in CPU memory, and only one checkpoint at
    once: the next checkpoint, an interruption and the end of training (leaving the context) wait for it.
    Processes that share a model use a separate process group for checkpoints, so that its messages do not mix
    with the collectives of training.

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


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the weights and the optimizer state of a checkpoint, and return its state (see `read_state`).

    The memory of a recurrent model is returned as "recurrent_state". Raises `InputError` that names the file
    that is missing, damaged or does not fit, and how to continue.
    """
    state = checked_state(path)
    load_model(path, model)
    if is_sharded_checkpoint(path, model):
        from polyformer.training.sharded_checkpoint import read_optimizer

        with _explain_damage(path):
            read_optimizer(path, state, model, optimizer)
    else:
        tensors = _read_tensors(path, OPTIMIZER)
        set_optimizer_state(path / OPTIMIZER, model, optimizer, tensors, state["optimizer"])
    if MEMORY in state["sha256"]:
        state["recurrent_state"] = state_of(_read_tensors(path, MEMORY), path / MEMORY)
    return state


def load_model(path: Path, model: nn.Module) -> None:
    """Load the weights of checkpoint `path` into `model`. Collective if the model is sharded."""
    if is_sharded_checkpoint(path, model):
        from polyformer.training.sharded_checkpoint import read_model

        digests = checked_state(path)["sha256"]
        with _explain_damage(path):
            read_model(path, digests, model)
        return
    load_weights(model, _read_tensors(path, MODEL), path / MODEL)


def load_average(paths: list[Path], model: nn.Module) -> int:
    """Load the mean of the weights of several checkpoints into `model`; return the number of checkpoints.

    Sums are in float64. Integer and boolean tensors are counters and masks, not weights: they are taken from
    the last checkpoint. Vaswani et al. 2017, section 6.1: the last 5 checkpoints for base models, the last 20
    for big models.
    """
    from polyformer.training.distributed.collectives import local_shard
    from polyformer.training.distributed.sharded_files import unique_tensors

    sums: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        load_model(path, model)
        state = unique_tensors(model.state_dict(keep_vars=True))
        tensors = {name: local_shard(tensor) for name, tensor in state.items() if tensor.is_floating_point()}
        sums = {name: sums.get(name, 0) + tensor.double() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.copy_(sums[name] / len(paths))
    return len(paths)


def is_sharded_checkpoint(path: Path, model: nn.Module) -> bool:
    """Return whether the checkpoint or the model is sharded over several processes."""
    if has_parts(path) or not torch.distributed.is_initialized():
        return has_parts(path)
    from polyformer.training.distributed import sharded_files  # its torch modules take a second to load

    return sharded_files.is_sharded(model)


def load_weights(model: nn.Module, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Load `tensors` (read from `source`) into `model`; tied weights are stored once."""
    tied = tied_names(model.state_dict())
    again = {name: tensors[first] for name, first in tied.items() if first in tensors}
    try:
        model.load_state_dict({**tensors, **again})
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"{source} does not fit this model: {why}; use the model that the run began with"
        ) from error


def checked_state(path: Path) -> dict[str, Any]:
    """Return `read_state(path)`; errors also say how to continue."""
    with _explain_damage(path):
        return read_state(path)


def _read_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    expected = checked_state(path)["sha256"][name]
    with _explain_damage(path):
        tensors = read_tensors(path / name)
        if file_digest(path / name) != expected:
            raise InputError(f"{path / name} is damaged: its bytes are not those written")
    return tensors


def is_intact(path: Path) -> bool:
    """Return whether a checkpoint is complete and undamaged."""
    try:
        digests = read_state(path)["sha256"]
        return all(file_digest(path / name) == digest for name, digest in digests.items())
    except (InputError, OSError):
        return False


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Add to an `InputError` about the checkpoint `path` how to continue without it."""
    try:
        yield
    except FormatError:
        raise
    except InputError as error:
        run = path.parent.parent
        checkpoints = Checkpoints(run)
        earlier = [step for step in checkpoints.steps() if step < step_of(path)]
        whole = next((step for step in reversed(earlier) if is_intact(checkpoints.path(step))), None)
        way = f"resume from the checkpoint before it: polyformer train --resume {run} --from-step {whole}"
        if whole is None:
            way = (
                "there is no intact checkpoint before it: start again in another folder: "
                f"polyformer train {run / 'recipe.yaml'} --out NEW"
            )
        raise InputError(f"{error}; {way}") from error
