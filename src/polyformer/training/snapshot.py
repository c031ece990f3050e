"""What a checkpoint holds, in memory: as it lies there, or a copy that training no longer changes."""

import copy
import dataclasses
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyformer.core.files import save_tensors
from polyformer.core.state import State
from polyformer.core.state_files import state_tensors
from polyformer.ops.tuning import recorded
from polyformer.training.environment import versions
from polyformer.training.optimizer_state import optimizer_state
from polyformer.training.state import MEMORY, Progress, write_state


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds of a run, or this process's part of it."""

    progress: Progress
    weights: dict[str, Tensor]  # and buffers, by their names in the model; tied ones are one object
    optimizer: dict[str, Tensor]  # by NAME/KEY
    kind: dict[str, Any]  # the optimizer's class, and its state that is no tensor
    machine: dict[str, Any]  # what computes
    tuning: dict[str, Any]  # the choices that it computes with
    carried: State | None  # what the model remembers of the last batches

    @classmethod
    def of(
        cls,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        machine: dict[str, Any],
        carried: State | None,
    ) -> Self:
        """That of a run as it lies in memory."""
        memory, scalars = optimizer_state(model, optimizer)
        kind = {"kind": type(optimizer).__name__, "scalars": scalars}
        return cls(progress, model.state_dict(keep_vars=True), memory, kind, machine, recorded(), carried)

    def copied(self) -> Self:
        """The same on the CPU, whatever becomes of the run's; tied tensors are one object still."""
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = _copied(tensor.detach())
            return copies[id(tensor)]

        snapshot = dataclasses.replace(
            self,
            progress=copy.deepcopy(self.progress),
            weights={name: own(tensor) for name, tensor in self.weights.items()},
            optimizer={name: own(tensor) for name, tensor in self.optimizer.items()},
            kind=copy.deepcopy(self.kind),
            carried=None if self.carried is None else self.carried.map(own),
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to pinned memory are on their way
        return snapshot

    def write_rest(self, folder: Path, digests: dict[str, str] | None = None) -> None:
        """Write into a checkpoint's folder all that is not of model and optimizer; `digests` of files of
        these that `write_state` does not make."""
        if self.carried is not None:
            save_tensors(folder / MEMORY, state_tensors(self.carried))
        write_state(folder, self.progress, self.kind, versions(), self.machine, self.tuning, digests)


def _copied(tensor: Tensor) -> Tensor:
    """A copy of `tensor` on the CPU; of a divided one this process's part, which says so still."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        copied = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return copied.copy_(tensor, non_blocking=True)
    names, form = flatten()
    parts = {name: getattr(tensor, name) for name in names}
    parts = {name: _copied(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(parts, form, tensor.shape, tensor.stride())
