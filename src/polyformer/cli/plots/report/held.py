"""The validation rows that the examples of a report are taken from, and the rule that chooses among them."""

import dataclasses
from collections.abc import Sequence
from itertools import islice
from typing import Any

from polyformer.data import load
from polyformer.training.recipes.run import Run
from polyformer.training.tasks.text import STREAMED_ROWS

GENERATED = 100
"""The most rows for which a model generates, tags or answers, so that a report takes seconds."""

SHOWN = 4
"""The examples in each of the groups best, typical and worst."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOutRows:
    """The validation `rows` of a run with its task and model (in evaluation mode, on a CPU).

    scores: the metrics of the validation data in run.json. seed: the seed of the run, for sampling.
    """

    task: Any
    model: Any
    rows: list[Any]
    scores: dict[str, float]
    seed: int

    @property
    def first(self) -> list[Any]:
        """The first `GENERATED` rows."""
        return self.rows[:GENERATED]

    @property
    def extent(self) -> str:
        """The part of the data that `first` is, in words."""
        count = len(self.rows)
        return f"the first {GENERATED} of {count:,}" if count > GENERATED else f"{count:,}"


def read_held_out(run: Run, model: Any) -> HeldOutRows:
    """Return the validation rows of `run`; of streamed rows the first. There may be none.

    Raises `InputError` if the data cannot be read any more.
    """
    task = run.recipe.task
    rows = (task.own_data or load(run.recipe.data, task.needs)).validation
    kept = [] if rows is None else list(rows if hasattr(rows, "__len__") else islice(rows, STREAMED_ROWS))
    scores = run.facts.get("metrics", {}).get("validation", {})
    return HeldOutRows(run.task, model, kept, scores, run.recipe.seed)


def ranked(scores: Sequence[float]) -> dict[str, list[int]]:
    """Return the numbers of the examples by group: `SHOWN` highest, around the median, and lowest.

    Equal scores keep the order of the rows. Few examples are one group.
    """
    order = sorted(range(len(scores)), key=lambda number: -scores[number])
    if len(order) <= 3 * SHOWN:
        return {"All, the best first": order}
    middle = (len(order) - SHOWN) // 2
    return {
        "Best": order[:SHOWN],
        "Typical": order[middle : middle + SHOWN],
        "Worst": order[-SHOWN:],
    }


def rule(score: str) -> str:
    """Return how `ranked` chooses by `score`, for readers."""
    return (
        f"Shown are the {SHOWN} with the highest {score}, the {SHOWN} around the median and the {SHOWN} with "
        "the lowest; rows with equal scores in the order of the data."
    )
