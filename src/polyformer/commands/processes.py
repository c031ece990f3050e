"""The processes of a command: one, or those that torchrun started, which share data or one model."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from polyformer.tasks.base import Workers


@contextmanager
def workers(device: str) -> "Iterator[Workers]":
    """The processes of this command, each on a device of its own where there are GPUs."""
    from polyformer.recipes.run import choose_device
    from polyformer.tasks.base import Workers

    if not several():
        yield Workers()
        return
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=choose_device(device).type == "cpu")
    try:
        yield Workers.of(accelerator)  # type: ignore[arg-type]
    finally:
        accelerator.end_training()  # closes what they exchange sums through


@contextmanager
def divided(device: str) -> "Iterator[Shares]":
    """The same for a command that writes with one model, of whose heads each process has some. What the
    others print is dropped."""
    if not several():
        yield Shares()
        return
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh

    from polyformer.recipes.run import choose_device

    accelerator = Accelerator(cpu=choose_device(device).type == "cpu")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("tensor",))
    first, nowhere = accelerator.is_main_process, Path(os.devnull)
    try:
        with nullcontext() if first else nowhere.open("w") as dropped, redirect_stdout(dropped or sys.stdout):
            yield Shares(accelerator.device, mesh)
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
            from polyformer.parallel.tensor import divide_heads

            divide_heads(model, self.mesh)
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
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
