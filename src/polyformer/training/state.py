"""The file state.json of a checkpoint: the progress of a run, with a checksum verified on reading."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polyformer.core.errors import InputError, quote
from polyformer.core.files import open_file, read_bounded
from polyformer.core.limits import JSON_BYTES
from polyformer.core.parsing import parse_json

FORMAT = 2
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
MEMORY = "memory.safetensors"  # only for a recurrent model
MODEL_PARTS, OPTIMIZER_PARTS = "model", "optimizer"  # folders instead of the files, for a sharded model
CHECKSUM = "checksum"
PREFIX = "step-"

PARTS = {
    "sha256": set(),
    "optimizer": {"kind", "scalars"},
    "versions": set(),
    "machine": set(),
}


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
    best: float | None = None  # best value of the task's metric so far
    best_step: int | None = None
    stale: int = 0  # evaluations in a row without a new best
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    loss_sum: float = 0.0  # since the last row of metrics: loss times labelled tokens,
    weight_sum: float = 0.0  # and labelled tokens
    scaler: dict[str, Any] = field(default_factory=dict)  # loss scale of fp16

    def compare(self, value: float, direction: Literal["min", "max"]) -> bool:
        """Record an evaluation, better in `direction`; return whether it is the best so far."""
        sign = 1.0 if direction == "min" else -1.0
        # NaN is never the best: every comparison with it is false.
        improved = value == value and (self.best is None or sign * value < sign * self.best)
        if improved:
            self.best, self.best_step, self.stale = value, self.step, 0
        else:
            self.stale += 1
        return improved


def write_state(
    folder: Path,
    progress: Progress,
    optimizer: dict[str, Any],
    versions: dict[str, str],
    machine: dict[str, Any],
    tuning: dict[str, Any],
    digests: dict[str, str] | None = None,
) -> None:
    """Write state.json next to the tensor files in `folder`; digests: checksums that are already known."""
    state = {
        "format": FORMAT,
        "progress": dataclasses.asdict(progress),
        "optimizer": optimizer,
        "sha256": {
            **(digests or {}),
            **{
                name: file_digest(folder / name)
                for name in (MODEL, OPTIMIZER, MEMORY)
                if (folder / name).exists()
            },
        },
        "versions": versions,
        "machine": machine,
        "tuning": tuning,
    }
    text = json.dumps({**state, CHECKSUM: checksum(state)}, indent=2) + "\n"
    (folder / STATE).write_text(text)


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
            f"this version of polyformer reads format {FORMAT}: go on with the version that wrote it"
        )
    if not all(
        isinstance(state.get(name), dict) and keys <= set(state[name]) for name, keys in PARTS.items()
    ):
        raise InputError(f"{file} is not the state of a training run")
    whole = {MODEL, OPTIMIZER} <= set(state["sha256"])
    if not whole and not any(name.startswith(f"{MODEL_PARTS}/") for name in state["sha256"]):
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
