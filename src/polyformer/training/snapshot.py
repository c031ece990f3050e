"""The content of a checkpoint in memory: references to the live tensors, or a copy."""

import copy
import dataclasses
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyformer.core.files import save_tensors
from polyformer.core.ops.tuning import recorded
from polyformer.core.state import State
from polyformer.core.state_files import state_tensors
from polyformer.training.environment import versions
from polyformer.training.optimizer_state import optimizer_state
from polyformer.training.state import MEMORY, Progress, write_state


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint of a run, or the shard of this process."""

    progress: Progress
    weights: dict[str, Tensor]  # and buffers, by their names in the model; tied tensors are the same object
    optimizer: dict[str, Tensor]  # by NAME/KEY
    kind: dict[str, Any]  # the optimizer class, and its state that is not a tensor
    machine: dict[str, Any]  # the hardware
    tuning: dict[str, Any]  # the tuning choices in use
    recurrent_state: State | None  # memory of the last batches, for a recurrent model

    @classmethod
    def of(
        cls,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        machine: dict[str, Any],
        recurrent_state: State | None,
    ) -> Self:
        """Return a snapshot that references the tensors of a run."""
        memory, scalars = optimizer_state(model, optimizer)
        kind = {"kind": type(optimizer).__name__, "scalars": scalars}
        return cls(
            progress, model.state_dict(keep_vars=True), memory, kind, machine, recorded(), recurrent_state
        )

    def copy_to_cpu(self) -> Self:
        """Return a copy on the CPU that training does not change; tied tensors stay the same object."""
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy_to_cpu(tensor.detach())
            return copies[id(tensor)]

        snapshot = dataclasses.replace(
            self,
            progress=copy.deepcopy(self.progress),
            weights={name: own(tensor) for name, tensor in self.weights.items()},
            optimizer={name: own(tensor) for name, tensor in self.optimizer.items()},
            kind=copy.deepcopy(self.kind),
            recurrent_state=None if self.recurrent_state is None else self.recurrent_state.map(own),
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to pinned memory are asynchronous
        return snapshot

    def write_rest(self, folder: Path, digests: dict[str, str] | None = None) -> None:
        """Write the files of a checkpoint except the model and the optimizer into `folder`.

        digests: checksums of model and optimizer files that `write_state` does not compute.
        """
        if self.recurrent_state is not None:
            save_tensors(folder / MEMORY, state_tensors(self.recurrent_state))
        write_state(folder, self.progress, self.kind, versions(), self.machine, self.tuning, digests)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` on the CPU; of a sharded tensor, a sharded copy of the local shard."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        copy_to_cpu = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return copy_to_cpu.copy_(tensor, non_blocking=True)
    names, form = flatten()
    parts = {name: getattr(tensor, name) for name in names}
    parts = {name: _copy_to_cpu(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(parts, form, tensor.shape, tensor.stride())
