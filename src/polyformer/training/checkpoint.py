"""Checkpoints of a run: whole or absent, enough to go on bit by bit, checked when read.

OUT/checkpoints/step-00000100/model.safetensors       weights and buffers, under the model's own names
                              optimizer.safetensors   NAME/exp_avg, ...: the optimizer's tensors by parameter
                              memory.safetensors      what a model remembers of the last batches
                              state.json              where the run stands, checksums, versions, machine, and
                                                        the choices of tuning it computed with
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
from polyformer.core.state_files import state_of
from polyformer.training.averaging import average_weights
from polyformer.training.optimizer_state import set_optimizer_state
from polyformer.training.snapshot import Snapshot
from polyformer.training.state import (
    MEMORY,
    MODEL,
    OPTIMIZER,
    PREFIX,
    FormatError,
    file_digest,
    has_parts,
    read_state,
    step_of,
)

CHECKPOINTS = "checkpoints"


class Checkpoints:
    """The checkpoints of the run in `run`; only the first process of a run writes."""

    def __init__(self, run: Path, every: int = 1, keep: int = 1) -> None:
        self.folder, self.every, self.keep = run / CHECKPOINTS, every, keep

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, in order."""
        names = [path.name.removeprefix(PREFIX) for path in self.folder.glob(f"{PREFIX}*")]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of `step`, which may not exist."""
        return self.folder / f"{PREFIX}{step:08d}"

    def latest(self) -> Path | None:
        """The last whole checkpoint; None where there is none yet."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def choose(self, step: int | None) -> Path | None:
        """The checkpoint of `step`, by default the last one; None where there is none yet."""
        if step is None:
            return self.latest()
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise InputError(f"from_step: {self.folder} has no checkpoint of step {step}; it has {there}")
        return self.path(step)

    def regular(self) -> list[Path]:
        """The last `keep` of those at regular distances and the last of all: no one saved for being best."""
        steps = self.steps()
        return [self.path(step) for step in steps if step % self.every == 0 or step == steps[-1]][
            -self.keep :
        ]

    def write(self, snapshot: Snapshot, group: ProcessGroup | None = None) -> None:
        """Write the checkpoint of `snapshot`, then remove those that are not to be kept.

        Of a divided model every process of `group` calls it and writes its parts. The first makes the folder
        and, when all have written, the state, and gives it its name: whole or absent as ever.
        """
        if group is not None:
            from polyformer.parallel.checkpoint import raise_together

            complaint = None
            try:
                self._write_parts(snapshot, group)
            except InputError as error:
                complaint = str(error)
            raise_together(complaint, group)
            return
        with atomic_directory(self.path(snapshot.progress.step)) as folder:
            save_tensors(folder / MODEL, snapshot.weights)
            save_tensors(folder / OPTIMIZER, snapshot.optimizer)
            snapshot.write_rest(folder)
        self.prune(snapshot.progress.best_step)

    def _write_parts(self, snapshot: Snapshot, group: ProcessGroup) -> None:
        from polyformer.parallel.checkpoint import raise_together, shown_to_all
        from polyformer.training.divided_files import write_divided

        first, complaint = torch.distributed.get_rank() == 0, None
        path = self.path(snapshot.progress.step)
        with ExitStack() as opened:
            folder = None
            try:
                folder = opened.enter_context(atomic_directory(path)) if first else None
            except InputError as error:
                complaint = str(error)
            raise_together(complaint, group)
            folder = shown_to_all(folder, group)
            with writing(path):
                digests = write_divided(folder, snapshot.weights, snapshot.optimizer, group)
            if first:
                snapshot.write_rest(folder, digests)
        if first:
            self.prune(snapshot.progress.best_step)

    def prune(self, best_step: int | None) -> None:
        """Remove all but the regular ones to keep and the best, and what killed writers left."""
        remove_partials(self.folder)
        kept = {*self.regular(), self.path(best_step) if best_step is not None else None}
        for step in self.steps():
            if self.path(step) not in kept:
                remove_directory(self.path(step))

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, the last one first: the last that is left counts."""
        for later in reversed(self.steps()):
            if later > step:
                remove_directory(self.path(later))


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's weights and optimizer state into place; returns its state (see `read_state`), and
    as "carried" what the model remembers.

    `InputError` names the file that is missing, damaged or does not fit, and the way out.
    """
    state = checked_state(path)
    load_model(path, model)
    if by_parts(path, model):
        from polyformer.training.divided_files import read_optimizer

        with _damage(path):
            read_optimizer(path, state, model, optimizer)
    else:
        tensors = _read_tensors(path, OPTIMIZER)
        set_optimizer_state(path / OPTIMIZER, model, optimizer, tensors, state["optimizer"])
    if MEMORY in state["sha256"]:
        state["carried"] = state_of(_read_tensors(path, MEMORY), path / MEMORY)
    return state


def load_model(path: Path, model: nn.Module) -> None:
    """Put the weights of checkpoint `path` into `model`; where that is divided, every process calls it."""
    if by_parts(path, model):
        from polyformer.training.divided_files import read_model

        digests = checked_state(path)["sha256"]
        with _damage(path):
            read_model(path, digests, model)
        return
    put_weights(model, _read_tensors(path, MODEL), path / MODEL)


def load_average(paths: list[Path], model: nn.Module) -> int:
    """Put the mean of the weights of several checkpoints into `model`; returns how many."""
    if any(by_parts(path, model) for path in paths):
        from polyformer.training.divided_files import read_average

        read_average(paths, model)
        return len(paths)
    files = [path / MODEL for path in paths]
    put_weights(model, average_weights(files), files[-1])
    return len(paths)


def by_parts(path: Path, model: nn.Module) -> bool:
    """Whether the checkpoint or the model is of several processes, of which each has a part."""
    return has_parts(path) or _is_divided(model)


def _is_divided(model: nn.Module) -> bool:
    if not torch.distributed.is_initialized():
        return False
    from polyformer.parallel.checkpoint import is_divided  # torch's parts for it take a second to load

    return is_divided(model)


def put_weights(model: nn.Module, tensors: dict[str, torch.Tensor], source: Path) -> None:
    """Load `tensors` (read from `source`) into `model`; tied weights stand in them once."""
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
    """`read_state`, whose errors name the way out."""
    with _damage(path):
        return read_state(path)


def _read_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    expected = checked_state(path)["sha256"][name]
    with _damage(path):
        tensors = read_tensors(path / name)
        if file_digest(path / name) != expected:
            raise InputError(f"{path / name} is damaged: its bytes are not those written")
    return tensors


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is as it was written."""
    try:
        digests = read_state(path)["sha256"]
        return all(file_digest(path / name) == digest for name, digest in digests.items())
    except (InputError, OSError):
        return False


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Adds to an `InputError` about the checkpoint `path` how to go on without it."""
    try:
        yield
    except FormatError:
        raise
    except InputError as error:
        raise InputError(f"{error}; {_way_out(path)}") from error


def _way_out(path: Path) -> str:
    run = path.parent.parent
    checkpoints = Checkpoints(run)
    earlier = [step for step in checkpoints.steps() if step < step_of(path)]
    whole = next((step for step in reversed(earlier) if is_whole(checkpoints.path(step))), None)
    if whole is not None:
        return f"go on from the checkpoint before it: polyformer train --resume {run} --from-step {whole}"
    return (
        "there is no whole checkpoint before it: begin again in another folder: "
        f"polyformer train {run / 'recipe.yaml'} --out NEW"
    )
