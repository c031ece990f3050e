"""The scores of a run, and the time of a training step relative to another run's, measured in turn."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from polyformer.core.host_values import IGNORED
from polyformer.core.measuring import median, time_interleaved
from polyformer.training.recipes import Run
from polyformer_lab.cells import Cell, Row, measurement, resumed
from polyformer_lab.measures.scores import scores


@measurement()
def faster_than(cell: Cell, run: str, rows: int, length: int, repeats: int) -> Row:
    """Return the scores of the cell's masked model, and how many times as fast as another model it trains.

    Args:
        cell: a run.
        run: the folder of a finished run with the other model.
        rows: the rows of a batch.
        length: the tokens of a row.
        repeats: the timed passes of each model, forward and backward.
    """
    other = resumed(Run.open(Path(run)).recipe, Path(run)).model
    steps = {"own": step(cell.fitted.model, rows, length), "other": step(other, rows, length)}
    timed = time_interleaved(steps, repeats)
    return {**scores(cell), "speedup": median(timed["other"]) / median(timed["own"])}


def step(model: nn.Module, rows: int, length: int, masked: float = 0.15) -> Callable[[], object]:
    """Return a forward and backward pass over a batch that is equal for all models.

    masked: the share of tokens with a label.
    """
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(200, (rows, length), generator=draw)
    labels = ids.masked_fill(torch.rand(rows, length, generator=draw) >= masked, IGNORED)
    model.train()

    def run() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()

    return run
