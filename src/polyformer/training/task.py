"""What the training loop asks of a task: batches, a loss, and how good the model is."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from polyformer.core.state import State

Batch = dict[str, torch.Tensor]
Item = TypeVar("Item")


class Evaluators(Protocol):
    """The processes that share an evaluation: an `accelerate.Accelerator`, as far as tasks need one."""

    @property
    def process_index(self) -> int:
        """Which of them this one is."""
        ...

    @property
    def num_processes(self) -> int:
        """How many there are."""
        ...

    def reduce(self, tensor: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """The sum ("sum") of the tensors of all, of one shape."""
        ...


@runtime_checkable
class Task(Protocol):
    """One way to train a model. The loop knows tasks only through this."""

    @property
    def best(self) -> str:
        """The name of the metric, among those of `evaluate`, that decides which checkpoint is best."""
        ...

    @property
    def direction(self) -> Literal["min", "max"]:
        """Whether a smaller ("min") or a larger ("max") `best` metric is better."""
        ...

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """The batches of one pass over the data that this process takes, as CPU tensors.

        An epoch is one fixed sequence of batches, the same on every process and every call: a function of
        the task's seed and `epoch` (0, 1, ...) alone, never of global random state. The first `skip` batches
        of it (counted over all processes) are used already; of the rest this process takes those at `rank`,
        `rank + world`, `rank + 2 * world`, ... (`share` below does it; where making a batch is dear, skip
        without making it). Batches may differ in size, and be of any number.
        """
        ...

    def weight(self, batch: Batch) -> int:
        """How many labelled tokens (or items) the mean of `loss` runs over. Called on the CPU tensors."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss over the labelled tokens of `batch`: a scalar to differentiate.

        `model` may be wrapped (data parallel, compiled): call it as `model(**batch)`, read no attribute.
        """
        ...

    def evaluate(self, model: nn.Module, accelerator: Evaluators) -> dict[str, float]:
        """Metrics on held-out data, the same on every process; called on all of them, without gradients.

        `model` is the plain module in evaluation mode. Share the work by `accelerator.process_index` and
        `accelerator.num_processes`, add up with `accelerator.reduce` or `accelerator.gather`.
        An empty mapping says there is nothing to evaluate on.
        """
        ...


@runtime_checkable
class ContinuedTask(Task, Protocol):
    """A task whose batches may go on with the texts of the batch before, row by row.

    Then each process takes its rows of every batch (`share_rows`), and `skip` of `batches` counts batches
    that all of them have read. The loss of a batch without a labelled token is 0.
    """

    @property
    def continues(self) -> bool:
        """Whether they do."""
        ...

    def loss_after(
        self, model: nn.Module, batch: Batch, state: State | None
    ) -> tuple[torch.Tensor, State | None]:
        """As `loss`, of a model that remembers: after the state that the batch before left (None before the
        first one); and the state that this one leaves, detached."""
        ...


@runtime_checkable
class ConcludedTask(Task, Protocol):
    """A task that measures more of the final weights than of those on the way."""

    def conclude(self, model: nn.Module, accelerator: Evaluators) -> dict[str, dict[str, float]]:
        """Metrics by the name of what they are measured on; called as `evaluate` is."""
        ...


def share(sequence: Iterable[Item], skip: int, rank: int, world: int) -> Iterator[Item]:
    """The items of `sequence` after the first `skip` that fall to process `rank` of `world`."""
    return islice(sequence, skip + rank, None, world)


def share_rows(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The rows of `tensor` [B, ...] that fall to process `rank` of `world`: neighbours, so that the shares of
    all processes one after another are the tensor."""
    return tensor.tensor_split(world)[rank]
