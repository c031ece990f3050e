"""A task and its data, joined for the training loop."""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from polyformer.data import Splits, Stream
from polyformer.data.batching import Batch
from polyformer.tasks.base import TextTask, Workers
from polyformer.training import share

if TYPE_CHECKING:
    from accelerate import Accelerator


class Fitting:
    """A task and its data, as the training loop asks for them (`polyformer.training.Task`)."""

    def __init__(self, task: TextTask, splits: Splits, seed: int):
        self.task = task
        self.train = task.served(splits.train, seed)
        self.valid = None if splits.validation is None else task.held_out(splits.validation)

    @property
    def best(self) -> str:
        return self.task.best

    @property
    def direction(self) -> Literal["min", "max"]:
        return self.task.direction

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        if isinstance(self.train, Stream):
            yield from (batch for _, batch in share(self.train.epoch(epoch), skip, rank, world))
            return
        yield from (
            batch for _, batch in islice(self.train.epoch(epoch, position=(0, skip)), rank, None, world)
        )

    def weight(self, batch: Batch) -> int:
        return self.task.weight(batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.task.loss(model, batch)

    def evaluate(self, model: nn.Module, accelerator: "Accelerator") -> dict[str, float]:
        if self.valid is None:
            return {}
        return self.task.measure(model, self.valid, Workers.of(accelerator))
