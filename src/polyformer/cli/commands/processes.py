"""The processes of a command: one, or those that torchrun started, which share data or one model."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.core import launcher
from polyformer.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from polyformer.training.tasks.workers import Workers


@contextmanager
def workers(device: str) -> "Iterator[Workers]":
    """The processes of this command, each on a device of its own where there are GPUs."""
    from polyformer.training.tasks.workers import Workers

    if not several():
        yield Workers()
        return
    with _joined(device) as accelerator:
        yield Workers.of(accelerator)  # type: ignore[arg-type]


@contextmanager
def divided(device: str) -> "Iterator[Shares]":
    """The same for a command that writes with one model, of whose heads each process has some. What the
    others print is dropped."""
    if not several():
        yield Shares()
        return
    from torch.distributed.device_mesh import init_device_mesh

    with _joined(device) as accelerator:
        place, number = accelerator.device, accelerator.num_processes
        mesh = init_device_mesh(place.type, (number,), mesh_dim_names=("tensor",))
        first, nowhere = accelerator.is_main_process, Path(os.devnull)
        with nullcontext() if first else nowhere.open("w") as dropped, redirect_stdout(dropped or sys.stdout):
            yield Shares(place, mesh)


@contextmanager
def _joined(device: str) -> "Iterator[Accelerator]":
    """The group of all processes, open, and closed at the end."""
    from accelerate import Accelerator

    from polyformer.training.recipes.run import choose_device

    accelerator = Accelerator(cpu=choose_device(device).type == "cpu")
    try:
        yield accelerator
    finally:
        accelerator.end_training()


@dataclass(frozen=True)
class Shares:
    """The device of this process and the mesh of all, where there are several."""

    device: "torch.device | None" = None
    mesh: "DeviceMesh | None" = None

    def loading(self, device: str) -> str:
        """Where to load a model, on `device` if one process has it: from the CPU each takes its part."""
        return device if self.mesh is None else "cpu"

    def divide(self, model: "nn.Module") -> None:
        """Leave this process's heads in `model`, and bring it to the device; `InputError` for a model or a
        number of processes by which heads do not divide."""
        if self.mesh is not None:
            from polyformer.training.distributed.tensor_parallel import apply_tensor_parallel

            apply_tensor_parallel(model, self.mesh)
            model.to(self.device)

    def agree(self, number: int) -> int:
        """The first process's `number`."""
        if self.mesh is None:
            return number
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([number])[0]


def refuse_several(what: str) -> None:
    """Raises `InputError` where several processes run what is measured by one."""
    if several():
        raise InputError(f"{what}: measured by one process; run it without torchrun")


def several() -> bool:
    """Whether a launcher started more processes than one."""
    return launcher.world() > 1
