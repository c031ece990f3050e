"""A task trained on a few rows that a tiny model can learn by heart."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from polyformer.data import Splits
from polyformer.data.rows import Batch
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.training.tasks import TaskWithData, TextTask

Metrics = dict[str, float]


def learned(
    task: TextTask, config: ModelConfig, rows: Sequence[Any], steps: int, lr: float = 3e-3
) -> tuple[Metrics, Metrics]:
    """Metrics over the first epoch's batches before and after `steps` updates of a model from `config`."""
    torch.manual_seed(0)
    model = Transformer(task.adapt(config.override("dropout", 0.0)))
    fitting = TaskWithData(task, Splits(rows, None, None), seed=0)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    before = _measured(task, model, fitting)
    for _, batch in zip(range(steps), _batches(fitting)):
        optimizer.zero_grad()
        task.objective.loss(model.train(), batch).backward()
        optimizer.step()
    return before, _measured(task, model, fitting)


def _batches(fitting: TaskWithData) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from fitting.batches(epoch, 0, 0, 1)


@torch.no_grad()
def _measured(task: TextTask, model: Transformer, fitting: TaskWithData) -> Metrics:
    totals = [task.metrics.totals(model.eval(), batch) for batch in fitting.batches(0, 0, 0, 1)]
    return task.metrics.values(torch.stack(totals).sum(0).tolist(), {})
