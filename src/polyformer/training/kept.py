"""The weights that a run keeps: the last, the best on validation data, or an average that is better.

Averages of the last checkpoints help long runs (Vaswani et al. 2017, section 6.1). In short runs checkpoints
differ too much, so that their average is worse than each of them. Therefore it is measured first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from torch import nn

from polyformer.training.checkpoint import Checkpoints, load_average, load_model
from polyformer.training.config import SavingConfig
from polyformer.training.state import Progress

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
