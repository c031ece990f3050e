"""The state carried from one batch to the next: the memory of a model that reads texts in segments."""

from typing import Any

from torch import Tensor, nn

from polyformer.core.state import State
from polyformer.training.engine import Engine
from polyformer.training.task import Batch, RecurrentTask, TrainingTask, share_rows


class RecurrentLoss:
    """The loss of each batch, given the state after the previous batches if model and task support it.

    state: of the rows of this process, detached; None before the first batch, and if no state is carried.
    `saved`: a checkpoint. Its state covers all rows, so that a run can resume on any number of processes.
    """

    def __init__(self, model: nn.Module, task: TrainingTask, engine: Engine, saved: dict[str, Any] | None):
        recurrent = getattr(model, "supports_recurrence", False) and getattr(task, "continues", False)
        self.plain = task
        self.task: RecurrentTask | None = task if recurrent else None  # type: ignore[assignment]
        self.engine = engine
        if getattr(task, "continues", False):
            next(
                task.batches(0, 0, engine.data_rank, engine.data_world), None
            )  # raises if the rows cannot be shared
        state: State | None = (saved or {}).get("recurrent_state")
        self.state = None if state is None else state.map(self._local_rows)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the labelled tokens of `batch`."""
        if self.task is None:
            return self.plain.loss(model, batch)
        loss, self.state = self.task.loss_after(model, batch, self.state)
        return loss

    def gather_state(self) -> State | None:
        """Return the state of all rows, for a checkpoint. Collective: every process calls it."""
        return None if self.state is None else self.state.map(self.engine.gather)

    def _local_rows(self, rows: Tensor) -> Tensor:
        return share_rows(rows, self.engine.data_rank, self.engine.data_world).to(self.engine.device)
