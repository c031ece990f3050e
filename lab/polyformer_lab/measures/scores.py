"""The default measurement of a study: the scores of its runs."""

import statistics
from itertools import pairwise
from pathlib import Path

from polyformer.training.metrics import read_metrics
from polyformer.training.recipes.fit import Fitted
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.costs import costs


@measurement()
def scores(cell: Cell) -> Row:
    """Return the scores by split ("validation.loss"), sizes, the last training loss, speed and costs."""
    return {**scores_and_sizes(cell.fitted, cell.folder), **costs(cell.fitted)}


def scores_and_sizes(fitted: Fitted, folder: Path) -> Row:
    """Return the scores by split, the sizes of the model, and what the log of a run in `folder` says."""
    sizes = {name: x.numel() for name, x in fitted.model.named_parameters()}
    row: Row = {
        f"{split}.{name}": value for split, own in fitted.scores.items() for name, value in own.items()
    }
    losses = [loss for each in read_metrics(folder) if (loss := each.get("loss")) is not None]
    return {
        **row,
        "training.loss": statistics.fmean(losses[-5:]) if losses else None,
        "parameters": sum(sizes.values()),
        "layer_parameters": sum(size for name, size in sizes.items() if "layers" in name),
        "seconds": step_seconds(folder),
    }


def step_seconds(folder: Path) -> float | None:
    """Return the seconds of a training step, the median over the log of the run."""
    rows = [{"step": 0.0, "seconds": 0.0}, *read_metrics(folder)]
    marks = [(float(row["step"] or 0), float(s)) for row in rows if (s := row.get("seconds")) is not None]
    steps = [(t - s) / (j - i) for (i, s), (j, t) in pairwise(marks) if j > i]
    return statistics.median(steps) if steps else None
