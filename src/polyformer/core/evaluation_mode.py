"""Evaluation mode during a `with`, for functions that read a model which may be in training."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from torch import nn


class Modules(Protocol):
    """An object with submodules: any `nn.Module`."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the module itself and all submodules."""
        ...


@contextlib.contextmanager
def evaluating(model: Modules) -> Iterator[None]:
    """Put the model in evaluation mode, and each of its modules back in its own mode at the end.

    As with `nn.Module.eval`, the mode belongs to the module and not to the thread: while a thread trains a
    model, other threads read a copy (`copy.deepcopy`).
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
