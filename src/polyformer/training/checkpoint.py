"""Checkpoints of a run: whole or absent, enough to go on bit by bit, checked when read.

OUT/checkpoints/step-00000100/model.safetensors       weights and buffers, under the model's own names
                              optimizer.safetensors   NAME/exp_avg, ...: the optimizer's tensors by parameter
                              state.json              where the run stands, checksums of the two, versions
"""

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import polyformer
from polyformer.core.errors import InputError
from polyformer.core.files import (
    atomic_directory,
    read_json,
    read_tensors,
    remove_directory,
    remove_partials,
    save_tensors,
    tied_names,
)

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass
class Progress:
    """Where a run stands after `step` updates.

    Random states need no place: every step seeds its own from `seed`.
    """

    seed: int
    step: int = 0
    epoch: int = 0
    used: int = 0  # batches of the epoch that are used
    best: float | None = None  # best value of the task's metric so far
    best_step: int | None = None
    stale: int = 0  # evaluations in a row without a new best
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    loss_sum: float = 0.0  # since the last row of metrics: loss times labelled tokens,
    weight_sum: float = 0.0  # and labelled tokens
    scaler: dict[str, Any] = field(default_factory=dict)  # loss scale of fp16


class Checkpoints:
    """The checkpoints in one folder; only the first process of a run writes."""

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, in order."""
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def regular(self) -> list[Path]:
        """The last `keep` of those at regular distances and the last of all: no one saved for being best."""
        steps = self.steps()
        return [self.path(step) for step in steps if step % self.every == 0 or step == steps[-1]][
            -self.keep :
        ]

    def save(self, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the checkpoint of `progress.step`, then remove those that are not to be kept."""
        tensors, scalars = optimizer_state(model, optimizer)
        with atomic_directory(self.path(progress.step)) as folder:
            save_tensors(folder / MODEL, model.state_dict())
            save_tensors(folder / OPTIMIZER, tensors)
            state = {
                "format": FORMAT,
                "progress": dataclasses.asdict(progress),
                "optimizer": {"kind": type(optimizer).__name__, "scalars": scalars},
                "sha256": {name: _digest(folder / name) for name in (MODEL, OPTIMIZER)},
                "versions": versions(),
            }
            (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")
        self.prune(progress.best_step)

    def prune(self, best_step: int | None) -> None:
        """Remove all but the regular ones to keep and the best, and what killed writers left."""
        remove_partials(self.folder)
        kept = {*self.regular(), self.path(best_step) if best_step is not None else None}
        for step in self.steps():
            if self.path(step) not in kept:
                remove_directory(self.path(step))


def versions() -> dict[str, str]:
    """Versions of what a run's bits depend on."""
    return {
        "polyformer": polyformer.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a checkpoint's weights and optimizer state into place; returns where the run stood.

    `InputError` names the file that is missing, damaged or does not fit, and the way out.
    """
    state = read_state(path)
    load_model(path, model)
    tensors = _read_tensors(path, OPTIMIZER)
    set_optimizer_state(path, model, optimizer, tensors, state["optimizer"])
    return Progress(**state["progress"])


def load_model(path: Path, model: nn.Module) -> None:
    """Put the weights of checkpoint `path` into `model`."""
    put_weights(model, _read_tensors(path, MODEL), path / MODEL)


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


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of checkpoint `path`, its shape checked."""
    file = path / STATE
    try:
        state = read_json(file)
    except InputError as error:
        raise InputError(f"{error}; {_way_out(path)}") from error
    if not _is_state(state):
        raise InputError(f"{file} is not the state of a training run; {_way_out(path)}")
    if state["format"] != FORMAT:
        raise InputError(
            f"{file}: written as format {state['format']!r} by {state['versions']}; "
            f"this version of polyformer reads format {FORMAT}: go on with the version that wrote it"
        )
    return state


def _is_state(state: Any) -> bool:
    parts = {"progress": {one.name for one in dataclasses.fields(Progress)}, "sha256": {MODEL, OPTIMIZER}}
    parts |= {"optimizer": {"kind", "scalars"}, "versions": set()}
    return (
        isinstance(state, dict)
        and "format" in state
        and all(
            isinstance(state.get(name), dict) and keys <= set(state[name]) for name, keys in parts.items()
        )
    )


def _read_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    expected = read_state(path)["sha256"][name]
    try:
        tensors = read_tensors(path / name)
    except InputError as error:
        raise InputError(f"{error}; {_way_out(path)}") from error
    if _digest(path / name) != expected:
        raise InputError(f"{path / name} is damaged: its bytes are not those written; {_way_out(path)}")
    return tensors


def _way_out(path: Path) -> str:
    earlier = [one for one in sorted(path.parent.glob("step-*")) if one.name < path.name]
    if earlier:
        return f"remove {path} and resume again to go on from {earlier[-1].name}"
    return f"remove {path} and begin the run again: there is no earlier checkpoint"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's memory by parameter: tensors as "NAME/KEY", and what else it holds likewise."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter, memory in optimizer.state.items():
        for key, value in memory.items():
            place = tensors if isinstance(value, torch.Tensor) else scalars
            place[f"{names[id(parameter)]}/{key}"] = value
    return tensors, scalars


def set_optimizer_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    saved: dict[str, Any],
) -> None:
    """Give the optimizer the memory that `optimizer_state` took; its settings stay as it was built."""
    kind = type(optimizer).__name__
    if saved["kind"] != kind:
        raise InputError(
            f"{path / OPTIMIZER} belongs to {saved['kind']}, the run is set to {kind}; use the same one"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    memory: dict[str, dict[str, Any]] = {}
    for place, value in {**tensors, **saved["scalars"]}.items():
        name, key = place.rsplit("/", 1)
        # A copy: what was read is a map of the file.
        memory.setdefault(name, {})[key] = value.clone() if isinstance(value, torch.Tensor) else value
    strange = sorted(set(memory) - set(order))
    if strange:
        raise InputError(
            f"{path / OPTIMIZER} is of another model: it has {strange[0]!r}, which is not trained here"
        )
    optimizer.load_state_dict(
        {
            "state": {i: memory[name] for i, name in enumerate(order) if name in memory},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
