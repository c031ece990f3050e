"""A task with its data, as required by the training loop."""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.data import Splits, Stream
from polyformer.data.batching import Batch
from polyformer.data.prepared.rows import MappedBatches
from polyformer.training import share, share_rows
from polyformer.training.task import EvaluationGroup
from polyformer.training.tasks.base import Task
from polyformer.training.tasks.workers import Workers


class TaskWithData:
    """A task with its data: a `polyformer.training.TrainingTask`."""

    def __init__(self, task: Task, splits: Splits, seed: int):
        self.task = task
        self.train = task.training_batches(splits.train, seed)
        self.valid = None if splits.validation is None else task.held_out(splits.validation)
        self.test = splits.test

    @property
    def best(self) -> str:
        """Return the metric that compares checkpoints."""
        return self.task.best

    @property
    def direction(self) -> Literal["min", "max"]:
        """Return whether a smaller or a larger `best` is better."""
        return self.task.direction

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """Yield the batches of an epoch after the first `skip` for process `rank` of `world`.

        If batches continue each other's texts, yield the rows of the process of all batches.
        """
        if isinstance(self.train, Stream):
            yield from (batch for _, batch in share(self.train.epoch(epoch), skip, rank, world))
            return
        if isinstance(self.train, MappedBatches):
            yield from self.train.batches(epoch, skip + rank, world)
            return
        if self.continues:
            for _, batch in self.train.epoch(epoch, position=(0, skip)):
                yield _rows(batch, rank, world)
            return
        yield from (
            batch for _, batch in islice(self.train.epoch(epoch, position=(0, skip)), rank, None, world)
        )

    def weight(self, batch: Batch) -> int:
        """Return the number of labels in the mean of the loss of `batch`."""
        return self.task.weight(batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the training loss of `batch`."""
        return self.task.loss(model, batch)

    @property
    def supports_context_parallel(self) -> bool:
        """Return whether processes may share texts in training."""
        return self.task.supports_context_parallel

    @property
    def continues(self) -> bool:
        """Return whether a batch continues the texts of the previous batch."""
        return self.task.continues

    def loss_after(self, model: nn.Module, batch: Batch, state: State | None) -> tuple[Tensor, State | None]:
        """Return the training loss given the state after the previous batch, and the next state."""
        return self.task.loss_after(model, batch, state)

    def evaluate(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, float]:
        """Return the metrics of the validation data, empty without them."""
        if self.valid is None:
            return {}
        return self.task.measure(model, self.valid, Workers.of(accelerator))

    def evaluate_final(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, dict[str, float]]:
        """Return the metrics of the test data, empty without them."""
        if self.test is None:
            return {}
        return {"test": self.task.measure_rows(model, self.test, Workers.of(accelerator))}


def _rows(batch: Batch, rank: int, world: int) -> Batch:
    """Return the rows of `batch` for process `rank` of `world`; raise `InputError` for uneven shares."""
    if "number" in batch and world > 1:
        raise InputError(f"task: what makes its own data is trained by one process, not by {world}")
    rows = len(next(iter(batch.values())))
    if rows % world:
        raise InputError(
            f"task: {rows} rows that go on with their texts cannot be dealt evenly to {world} processes; "
            "change batch_tokens or row_length, whose quotient they are, or the number of processes"
        )
    return {name: share_rows(tensor, rank, world) for name, tensor in batch.items()}
