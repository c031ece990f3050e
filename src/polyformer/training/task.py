"""The interface between the training loop and tasks: batches, a loss, and an evaluation."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from polyformer.core.state import State
from polyformer.training.temperature import Calibration

Batch = dict[str, torch.Tensor]
Item = TypeVar("Item")


class EvaluationGroup(Protocol):
    """The processes that share an evaluation: the part of an `accelerate.Accelerator` that tasks use."""

    @property
    def process_index(self) -> int:
        """Return the index of this process."""
        ...

    @property
    def num_processes(self) -> int:
        """Return the number of processes."""
        ...

    def reduce(self, tensor: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the sum ("sum") of the tensors of all processes, which have the same shape."""
        ...


@runtime_checkable
class TrainingTask(Protocol):
    """A training task. The loop uses tasks only through this interface."""

    @property
    def best(self) -> str:
        """Return the name of the metric of `evaluate` that determines the best checkpoint."""
        ...

    @property
    def direction(self) -> Literal["min", "max"]:
        """Return whether a smaller ("min") or a larger ("max") `best` metric is better."""
        ...

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """Yield the batches of one epoch for this process, as CPU tensors.

        An epoch is one fixed sequence of batches, the same on every process and in every call: a function
        only of the task's seed and `epoch` (0, 1, ...), never of global random state. The first `skip`
        batches of the sequence (counted over all processes) are already used; of the rest this process takes
        the batches `rank`, `rank + world`, `rank + 2 * world`, ... (`share` below implements this; if a batch
        is expensive to make, skip without making it). Batches may differ in size, and there may be any number
        of them.
        """
        ...

    def weight(self, batch: Batch) -> int:
        """Return the number of labels (tokens or items) in the mean of `loss`, from the CPU tensors."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the labelled tokens of `batch`: a differentiable scalar.

        `model` may be wrapped (data parallel, compiled): call it as `model(**batch)`, and read no attribute.
        """
        ...

    def evaluate(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, float]:
        """Return metrics on held-out data, the same on every process; called on all, without gradients.

        `model` is the plain module in evaluation mode. Share the work by `accelerator.process_index` and
        `accelerator.num_processes`, add up with `accelerator.reduce` or `accelerator.gather`.
        An empty mapping means that there is no evaluation data.
        """
        ...


@runtime_checkable
class RecurrentTask(TrainingTask, Protocol):
    """A task with batches that may continue the texts of the previous batch, row by row.

    In this case each process takes its rows of every batch (`share_rows`), and `skip` of `batches` counts
    batches that all of them have read. The loss of a batch without a labelled token is 0.
    """

    @property
    def continues(self) -> bool:
        """Return whether batches continue the previous texts."""
        ...

    def loss_after(
        self, model: nn.Module, batch: Batch, state: State | None
    ) -> tuple[torch.Tensor, State | None]:
        """Return the loss, as `loss`, of a recurrent model, and its state after the batch, detached.

        state: the state after the previous batch; None before the first batch.
        """
        ...


@runtime_checkable
class FinalMetricsTask(TrainingTask, Protocol):
    """A task with additional metrics of the final weights."""

    def evaluate_final(self, model: nn.Module, accelerator: EvaluationGroup) -> dict[str, dict[str, float]]:
        """Return metrics by the name of their data; called in the same way as `evaluate`."""
        ...


@runtime_checkable
class CalibratedTask(TrainingTask, Protocol):
    """A task whose probabilities can be calibrated on held-out data."""

    def calibrate(self, model: nn.Module, accelerator: EvaluationGroup) -> Calibration | None:
        """Return the temperature of the logits of `model`; None without held-out data or without labels.

        Called in the same way as `evaluate`, with the final weights, which it does not change.
        """
        ...

    def divide_logits(self, model: nn.Module, temperature: float) -> None:
        """Divide all logits of `model` by a temperature, in its weights, whole or divided among processes."""
        ...


def share(sequence: Iterable[Item], skip: int, rank: int, world: int) -> Iterator[Item]:
    """Return the items of `sequence` after the first `skip` for process `rank` of `world`."""
    return islice(sequence, skip + rank, None, world)


def share_rows(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return the rows of `tensor` [B, ...] for process `rank` of `world`.

    The rows are contiguous: the concatenated shares of all processes are the tensor.
    """
    return tensor.tensor_split(world)[rank]
