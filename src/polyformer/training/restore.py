"""Checkpoints as they are read and verified: to resume a run, and for the weights that a run keeps.

A run keeps the last weights, the best on validation data, or an average that is better. Averages of the last
checkpoints help long runs (Vaswani et al. 2017, section 6.1). In short runs checkpoints differ too much, so
that their average is worse than each of them. Therefore it is measured first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer.core.files import read_tensors, tied_names
from polyformer.core.state import state_of
from polyformer.training.checkpoint import (
    MEMORY,
    MODEL,
    OPTIMIZER,
    Checkpoints,
    FormatError,
    Progress,
    file_digest,
    has_parts,
    read_state,
    set_optimizer_state,
    step_of,
)
from polyformer.training.config import SavingConfig


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the weights and the optimizer state of a checkpoint, and return its state (see `read_state`).

    The memory of a recurrent model is returned as "recurrent_state". Raises `InputError` that names the file
    that is missing, damaged or does not fit, and how to continue.
    """
    state = checked_state(path)
    load_model(path, model)
    if is_sharded_checkpoint(path, model):
        from polyformer.training.distributed.sharded_files import read_optimizer

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
        from polyformer.training.distributed.sharded_files import read_model

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
    from polyformer.training.distributed.fully_sharded import local_shard
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
    # Its torch modules take a second to load.
    from polyformer.training.distributed.sharded_files import is_sharded

    return is_sharded(model)


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


Metrics = dict[str, float]


@dataclass(frozen=True)
class Ranking:
    """The order of evaluations: by the metric `name`, then by the loss, which is better if lower."""

    name: str
    direction: Literal["min", "max"]

    def is_better(self, new: Metrics, old: Metrics) -> bool:
        """Return whether `new` is better than `old`. NaN is never better than a number."""
        sign = 1.0 if self.direction == "min" else -1.0
        value, other = sign * new[self.name], sign * old.get(self.name, float("nan"))
        if value != other:
            return value == value and not value > other
        return "loss" in new and new["loss"] < old.get("loss", float("nan"))

    def figures(self, metrics: Metrics) -> str:
        """Return the values that decide, for a message."""
        names = dict.fromkeys((self.name, "loss"))
        return ", ".join(f"{name.replace('_', ' ')} {metrics[name]:.4g}" for name in names if name in metrics)


@dataclass(frozen=True)
class Candidate:
    """Weights that a run may keep; `load` loads them into the model. `step`: None for an average."""

    name: str
    step: int | None
    load: Callable[[], object]
    metrics: Metrics = field(default_factory=dict)  # on validation data, if known


@dataclass(frozen=True)
class Kept:
    """The kept weights: their step (None for an average), the reason, and their validation metrics."""

    step: int | None
    reason: str
    metrics: Metrics

    def record(self) -> dict[str, int | str | None]:
        """Return the step and the reason, for run.json."""
        return {"step": self.step, "reason": self.reason}


def final_weights(
    saving: SavingConfig,
    checkpoints: Checkpoints,
    progress: Progress,
    model: nn.Module,
    measure: Callable[[], Metrics],
    ranking: Ranking,
) -> Kept:
    """Load the weights that `saving.final` asks for into `model`, which has the last; see `keep_best`."""
    kept = keep_best(candidates(saving, checkpoints, progress, model), progress.step, measure, ranking)
    if saving.final != "last" or progress.best_step in (None, progress.step):
        return kept
    figures = ranking.figures(progress.best_metrics)
    better = f"step {progress.best_step}: {figures}, which training.saving.final: best keeps"
    return replace(kept, reason=f"{kept.reason}; {better}")


def candidates(
    saving: SavingConfig, checkpoints: Checkpoints, progress: Progress, model: nn.Module
) -> list[Candidate]:
    """Return the weights among which `saving.final` chooses. Of equal ones the first are kept."""
    chosen = []
    if saving.final != "last" and progress.best_step not in (None, progress.step):
        load = partial(load_model, checkpoints.path(progress.best_step), model)
        name = f"the weights of step {progress.best_step}"
        chosen.append(Candidate(name, progress.best_step, load, progress.best_metrics))
    load = partial(load_model, checkpoints.path(progress.step), model)
    name = f"the last weights (step {progress.step})"
    chosen.append(Candidate(name, progress.step, load, progress.metrics))
    if saving.final == "average":
        paths = checkpoints.regular()[-saving.average :]
        name = f"the average of the last {len(paths)} checkpoints"
        chosen.append(Candidate(name, None, partial(load_average, paths, model)))
    return chosen


def keep_best(
    choices: Sequence[Candidate], loaded: int | None, measure: Callable[[], Metrics], ranking: Ranking
) -> Kept:
    """Load the best of `choices`, and say why; `measure` evaluates loaded weights without metrics.

    The model has the weights of step `loaded`. Without validation data the last choice is loaded, as the
    configuration asks.
    """
    if not any(choice.metrics for choice in choices):
        asked = choices[-1]
        if asked.step != loaded:
            asked.load()
        return Kept(asked.step, f"kept {asked.name}, without validation data", {})
    known: list[tuple[Candidate, Metrics]] = []
    for choice in choices:
        if not choice.metrics:
            choice.load()
            loaded = choice.step
        known.append((choice, choice.metrics or measure()))
    best, metrics = known[0]
    for choice, others in known[1:]:
        if ranking.is_better(others, metrics):
            best, metrics = choice, others
    if best.step != loaded:
        best.load()
    rest = [f"{choice.name}: {ranking.figures(figures)}" for choice, figures in known if choice is not best]
    said = f"kept {best.name}: {ranking.figures(metrics)} on validation data"
    return Kept(best.step, "; ".join([said, *rest]), metrics)
