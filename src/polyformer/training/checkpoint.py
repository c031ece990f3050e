"""Checkpoints of a run: their content, and writing that leaves them complete or absent.

A checkpoint contains the weights, the state of the optimizer and the progress of a run (`Snapshot`), which
suffice for an exact resume. Its file state.json has a checksum, which is verified on reading.

OUT/checkpoints/step-00000100/model.safetensors       weights and buffers, under the names in the model
                              optimizer.safetensors   NAME/exp_avg, ...: the optimizer's tensors by parameter
                              memory.safetensors      the memory of the last batches, for a recurrent model
                              state.json              progress of the run, checksums, versions, machine, and
                                                        the tuning choices used

`polyformer.training.restore` reads them, and `polyformer.training.distributed.sharded_files` writes those of
sharded models.
"""

import copy
import dataclasses
import hashlib
import json
import math
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.files import (
    atomic_directory,
    open_file,
    read_bounded,
    remove_directory,
    remove_partials,
    save_tensors,
)
from polyformer.core.ops.tuning import recorded
from polyformer.core.parsing import parse_json
from polyformer.core.ranges import JSON_BYTES
from polyformer.core.state import State, state_tensors
from polyformer.training.machine import versions
from polyformer.training.run_control import Interrupted

FORMAT = 3
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
MEMORY = "memory.safetensors"  # only for a recurrent model
MODEL_PARTS, OPTIMIZER_PARTS = "model", "optimizer"  # folders instead of the files, for a sharded model
CHECKSUM = "checksum"
PREFIX = "step-"

PARTS = {"sha256": set(), "optimizer": {"kind", "scalars"}, "versions": set(), "machine": set()}


class FormatError(InputError):
    """The error for a checkpoint of another format version, which is not damaged."""


@dataclass
class Progress:
    """The progress of a run after `step` updates.

    Random states are not included: every step seeds them from `seed`.
    """

    seed: int
    step: int = 0
    epoch: int = 0
    used: int = 0  # batches of the epoch used so far
    best_metrics: dict[str, float] = field(default_factory=dict)  # of the best evaluation so far
    best_step: int | None = None
    stale: int = 0  # evaluations in a row without a new best
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    loss_sum: float = 0.0  # since the last row of metrics: loss times labelled tokens,
    weight_sum: float = 0.0  # and labelled tokens
    scaler: dict[str, Any] = field(default_factory=dict)  # loss scale of fp16

    def compare(self, improved: bool) -> None:
        """Record whether the last evaluation is the best so far."""
        if improved:
            self.best_metrics, self.best_step, self.stale = self.metrics, self.step, 0
        else:
            self.stale += 1


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of state.json of the checkpoint `path`; "progress" is a `Progress`.

    Raises `InputError` if the file is missing, damaged, edited, or written in another format.
    """
    file = path / STATE
    # A metric may be NaN.
    state = parse_json(read_bounded(file, JSON_BYTES), file, dict, finite=False)
    if not isinstance(state.get("format"), int):
        raise InputError(f"{file} is not the state of a training run")
    if state["format"] != FORMAT:
        raise FormatError(
            f"{file}: written as format {state['format']} by {quote(state.get('versions'))}; "
            f"this version of polyformer reads format {FORMAT}: resume with the version that wrote it"
        )
    fits = all(isinstance(state.get(name), dict) and keys <= set(state[name]) for name, keys in PARTS.items())
    files = state["sha256"] if fits else {}
    if not {MODEL, OPTIMIZER} <= set(files) and not any(name.startswith(f"{MODEL_PARTS}/") for name in files):
        raise InputError(f"{file} is not the state of a training run")
    if state.pop(CHECKSUM, None) != checksum(state):
        raise InputError(f"{file} is damaged or was edited: its content does not match its checksum")
    return {**state, "progress": _progress(file, state.get("progress"))}


def check_progress(out: Path, progress: Progress, seed: int, steps: int) -> None:
    """Raise `InputError` if the run in `out` has another seed, or is already past `steps`."""
    if progress.seed != seed:
        raise InputError(f"seed: the run in {out} has {progress.seed}, got {seed}; use the same one")
    if progress.step > steps:
        raise InputError(
            f"steps: the run in {out} is already at step {progress.step}, got {steps}; "
            "expected as many or more"
        )


def checksum(state: dict[str, Any]) -> str:
    """Return the SHA-256 of `state` as JSON with sorted names."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the bytes of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_parts(path: Path) -> bool:
    """Return whether the checkpoint `path` is sharded: it has a file per process."""
    return (path / MODEL_PARTS).is_dir()


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(path.name.removeprefix(PREFIX))


def _progress(file: Path, values: Any) -> Progress:
    """Return `values` as a valid `Progress`; the step must match the name of the folder."""
    names = {field.name for field in dataclasses.fields(Progress)}
    if not isinstance(values, dict) or set(values) != names:
        raise InputError(f"{file} is not the state of a training run")
    progress = Progress(**values)
    if type(progress.step) is not int or progress.step != step_of(file.parent):
        raise InputError(
            f"{file}: its step is {quote(progress.step)}, its folder is called {file.parent.name}"
        )
    highest = {"seed": None, "epoch": None, "used": None, "best_step": progress.step, "stale": progress.step}
    for name, limit in highest.items():
        value = values[name]
        if name == "best_step" and value is None:
            continue
        if type(value) is not int or value < 0 or (limit is not None and value > limit):
            most = "" if limit is None else f" to {limit}"
            raise InputError(f"{file}: {name}: expected a whole number from 0{most}, got {quote(value)}")
    for name in ("loss_sum", "weight_sum"):
        value = values[name]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(f"{file}: {name}: expected a finite number, got {quote(value)}")
    return progress


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the optimizer state by parameter: tensors as "NAME/KEY", and other values in the same form."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, memory in optimizer.state.items():
        for key, value in memory.items():
            place = tensors if isinstance(value, torch.Tensor) else scalars
            place[f"{names[id(parameter)]}/{key}"] = value
    return tensors, scalars


def set_optimizer_state(
    file: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    saved: dict[str, Any],
) -> None:
    """Load the result of `optimizer_state`, read from `file`; the optimizer's settings do not change."""
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise InputError(f"{file} belongs to {saved['kind']}, the run is set to {kind}; use the same one")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    memory: dict[str, dict[str, Any]] = {}
    for place, value in {**tensors, **saved["scalars"]}.items():
        name, key = place.rsplit("/", 1)
        # A copy, because the tensors read are memory-mapped.
        memory.setdefault(name, {})[key] = value.clone() if isinstance(value, torch.Tensor) else value
    strange = sorted(set(memory) - set(order))
    if strange:
        raise InputError(f"{file} is of another model: it has {quote(strange[0])}, which is not trained here")
    optimizer.load_state_dict(
        {
            "state": {i: memory[name] for i, name in enumerate(order) if name in memory},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint of a run, or the shard of this process."""

    progress: Progress
    weights: dict[str, Tensor]  # and buffers, by their names in the model; tied tensors are the same object
    optimizer: dict[str, Tensor]  # by NAME/KEY
    kind: dict[str, Any]  # the optimizer class, and its state that is not a tensor
    machine: dict[str, Any]  # the hardware
    tuning: dict[str, Any]  # the tuning choices in use
    recurrent_state: State | None  # memory of the last batches, for a recurrent model

    @classmethod
    def of(
        cls,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        machine: dict[str, Any],
        recurrent_state: State | None,
    ) -> Self:
        """Return a snapshot that references the tensors of a run."""
        memory, scalars = optimizer_state(model, optimizer)
        kind = {"kind": type(optimizer).__name__, "scalars": scalars}
        return cls(
            progress, model.state_dict(keep_vars=True), memory, kind, machine, recorded(), recurrent_state
        )

    def copy_to_cpu(self) -> Self:
        """Return a copy on the CPU that training does not change; tied tensors stay the same object."""
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy_to_cpu(tensor.detach())
            return copies[id(tensor)]

        snapshot = dataclasses.replace(
            self,
            progress=copy.deepcopy(self.progress),
            weights={name: own(tensor) for name, tensor in self.weights.items()},
            optimizer={name: own(tensor) for name, tensor in self.optimizer.items()},
            kind=copy.deepcopy(self.kind),
            recurrent_state=None if self.recurrent_state is None else self.recurrent_state.map(own),
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to pinned memory are asynchronous
        return snapshot

    def write_rest(self, folder: Path, digests: dict[str, str] | None = None) -> None:
        """Write the files of a checkpoint except the model and the optimizer into `folder`.

        digests: checksums of model and optimizer files, if they are not `MODEL` and `OPTIMIZER`.
        """
        if self.recurrent_state is not None:
            save_tensors(folder / MEMORY, state_tensors(self.recurrent_state))
        files = [folder / name for name in (MODEL, OPTIMIZER, MEMORY)]
        state = {
            "format": FORMAT,
            "progress": dataclasses.asdict(self.progress),
            "optimizer": self.kind,
            "sha256": (digests or {}) | {file.name: file_digest(file) for file in files if file.exists()},
            "versions": versions(),
            "machine": self.machine,
            "tuning": self.tuning,
        }
        text = json.dumps({**state, CHECKSUM: checksum(state)}, indent=2) + "\n"
        (folder / STATE).write_text(text)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` on the CPU; of a sharded tensor, a sharded copy of the local shard."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        copy_to_cpu = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return copy_to_cpu.copy_(tensor, non_blocking=True)
    names, form = flatten()
    parts = {name: getattr(tensor, name) for name in names}
    parts = {name: _copy_to_cpu(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(parts, form, tensor.shape, tensor.stride())


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
