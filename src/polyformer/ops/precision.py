"""Computing in the precision of the tensors at hand, where autocast would choose another."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 as float32; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_device(x: Tensor) -> str:
    """The kind of device whose autocast `x` follows: its own; on `meta`, which has none, the CPU's."""
    return "cpu" if x.is_meta else x.device.type


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Operations inside run in the precision of their inputs, on the device of `x`."""
    return torch.autocast(autocast_device(x), enabled=False)


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """For the two passes of an autograd function: they run without autocast.

    Autocast turns products into half precision and leaves what they are written to as it is. A backward pass
    may be called inside it, and the threads of `ops/workers.py` know nothing of it in any case.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        first = next((argument for argument in arguments if isinstance(argument, Tensor)), None)
        if first is None:  # a backward pass whose gradients are all undefined
            return function(*arguments, **options)
        with without_autocast(first):
            return function(*arguments, **options)

    return run
