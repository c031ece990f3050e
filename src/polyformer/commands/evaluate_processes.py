"""The processes among which `evaluate` divides held-out data: one, or those that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polyformer.core.errors import InputError

if TYPE_CHECKING:
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
        yield Workers.of(accelerator)
    finally:
        accelerator.end_training()  # closes what they exchange sums through


def refuse_several(what: str) -> None:
    """Raises `InputError` where several processes run what is measured by one."""
    if several():
        raise InputError(f"{what}: measured by one process; run it without torchrun")


def several() -> bool:
    """Whether a launcher started more processes than one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
