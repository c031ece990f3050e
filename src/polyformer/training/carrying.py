"""What training carries from one batch to the next: the memory of a model that reads texts in segments."""

from typing import Any

from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.training.engine import Engine
from polyformer.training.task import Batch, ContinuedTask, Task


class Carrying:
    """The loss of every batch, after the state of those before it where model and task go on.

    state: detached, saved with each checkpoint; None before the first batch, and where nothing is carried.
    """

    def __init__(self, model: nn.Module, task: Task, engine: Engine, saved: dict[str, Any] | None):
        goes_on = getattr(model, "remembers", False) and getattr(task, "continues", False)
        self.plain = task
        self.task: ContinuedTask | None = task if goes_on else None  # type: ignore[assignment]
        if goes_on and engine.world > 1:
            raise InputError(
                "memory: its rows are those of one process, and this run has "
                f"{engine.world}; train it with one, or without a memory"
            )
        state: State | None = (saved or {}).get("carried")
        self.state = None if state is None else state.map(lambda tensor: tensor.to(engine.device))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the labelled tokens of `batch`."""
        if self.task is None:
            return self.plain.loss(model, batch)
        loss, self.state = self.task.loss_after(model, batch, self.state)
        return loss
