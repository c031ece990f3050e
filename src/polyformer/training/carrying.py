"""What training carries from one batch to the next: the memory of a model that reads texts in segments."""

from typing import Any

from torch import Tensor, nn

from polyformer.core.state import State
from polyformer.training.engine import Engine
from polyformer.training.task import Batch, ContinuedTask, Task, share_rows


class Carrying:
    """The loss of every batch, after the state of those before it where model and task go on.

    state: of this process's rows, detached; None before the first batch, and where nothing is carried.
    `saved`: a checkpoint, whose state is that of all rows, so that any number of processes goes on with it.
    """

    def __init__(self, model: nn.Module, task: Task, engine: Engine, saved: dict[str, Any] | None):
        goes_on = getattr(model, "remembers", False) and getattr(task, "continues", False)
        self.plain = task
        self.task: ContinuedTask | None = task if goes_on else None  # type: ignore[assignment]
        self.engine = engine
        if getattr(task, "continues", False):
            next(
                task.batches(0, 0, engine.data_rank, engine.data_world), None
            )  # refuses rows that cannot be shared
        state: State | None = (saved or {}).get("carried")
        self.state = None if state is None else state.map(self._own)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the labelled tokens of `batch`."""
        if self.task is None:
            return self.plain.loss(model, batch)
        loss, self.state = self.task.loss_after(model, batch, self.state)
        return loss

    def gathered(self) -> State | None:
        """The state of all rows, to be saved. Every process calls it."""
        return None if self.state is None else self.state.map(self.engine.gather)

    def _own(self, rows: Tensor) -> Tensor:
        return share_rows(rows, self.engine.data_rank, self.engine.data_world).to(self.engine.device)
