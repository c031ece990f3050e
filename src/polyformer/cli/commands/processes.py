"""The processes of a command: a single one, or those of torchrun, which share the data or the model."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.core.errors import InputError
from polyformer.training.machine import world

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from polyformer.training.task import Workers


@contextmanager
def workers(device: str) -> "Iterator[Workers]":
    """Yield the processes of this command, which are data parallel; with GPUs, each uses its own."""
    from polyformer.training.task import Workers

    if not several():
        yield Workers()
        return
    with _process_group(device) as accelerator:
        yield Workers.of(accelerator)  # type: ignore[arg-type]


@contextmanager
def tensor_parallel(device: str) -> "Iterator[ModelShard]":
    """Yield the processes of a command with one tensor-parallel model. Only the first process prints."""
    if not several():
        yield ModelShard()
        return
    from torch.distributed.device_mesh import init_device_mesh

    with _process_group(device) as accelerator:
        place, number = accelerator.device, accelerator.num_processes
        mesh = init_device_mesh(place.type, (number,), mesh_dim_names=("tensor",))
        first, nowhere = accelerator.is_main_process, Path(os.devnull)
        with nullcontext() if first else nowhere.open("w") as dropped, redirect_stdout(dropped or sys.stdout):
            yield ModelShard(place, mesh)


@contextmanager
def _process_group(device: str) -> "Iterator[Accelerator]":
    """Open the group of all processes, and close it at the end."""
    from accelerate import Accelerator

    from polyformer.training.machine import choose_device

    accelerator = Accelerator(cpu=choose_device(device).type == "cpu")
    try:
        yield accelerator
    finally:
        accelerator.end_training()


@dataclass(frozen=True)
class ModelShard:
    """The part of a model in this process: its device, and the mesh of all processes if there are several."""

    device: "torch.device | None" = None
    mesh: "DeviceMesh | None" = None

    def loading_device(self, device: str) -> str:
        """Return the device to load a model on: the CPU if the model is then divided, else `device`."""
        return device if self.mesh is None else "cpu"

    def divide(self, model: "nn.Module") -> None:
        """Keep this process's heads of `model` and move it to the device.

        Raises `InputError` if the number of heads is not divisible by the number of processes.
        """
        if self.mesh is not None:
            from polyformer.training.distributed.tensor_parallel import apply_tensor_parallel

            apply_tensor_parallel(model, self.mesh)
            model.to(self.device)

    def agree(self, number: int) -> int:
        """Return the `number` of the first process in all processes."""
        if self.mesh is None:
            return number
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([number])[0]


def refuse_several(what: str) -> None:
    """Raise `InputError` if several processes run a command for a single process."""
    if several():
        raise InputError(f"{what}: requires a single process; run it without torchrun")


def several() -> bool:
    """Return whether a launcher started more than one process."""
    return world() > 1


def resumable(folder: str | None, shared: "Workers", model: "nn.Module", settings: object) -> "Workers":
    """Return the processes with a store in `folder` for the results of `model` with these `settings`."""
    if folder is None:
        return shared
    from polyformer.applications.retrieval.readers import model_fingerprint
    from polyformer.training.machine import versions
    from polyformer.training.task import CachedResults

    subject = model_fingerprint(model, [settings, versions()])
    return dataclasses.replace(shared, results=CachedResults(Path(folder), subject, shared.rank))


def report(shared: "Workers") -> None:
    """Print on standard error how many results of this process were reused."""
    if shared.results is not None and shared.results.reused:
        prefix = f"process {shared.rank + 1} of {shared.world}: " if shared.world > 1 else ""
        every = shared.results.reused + shared.results.computed
        print(
            f"polyformer: {prefix}reused the results of {shared.results.reused:,} of {every:,} batches and "
            f"texts in {shared.results.file.parent}",
            file=sys.stderr,
        )
