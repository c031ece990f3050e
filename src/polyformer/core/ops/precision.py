"""Computing in the precision of the tensors, instead of autocast's."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def at_least_float32(x: Tensor) -> Tensor:
    """Return float16 and bfloat16 as float32, float32 and float64 unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_device(x: Tensor) -> str:
    """Return the device type of the autocast that applies to `x`; for `meta` the CPU."""
    return "cpu" if x.is_meta else x.device.type


def is_autocast(device: str) -> bool:
    """Return whether autocast is on for a device."""
    # Compiled functions cannot ask torch 2.11 whether a device has autocast at all; only `meta` has none.
    return device != "meta" and torch.is_autocast_enabled(device)


def in_autocast_type(x: Tensor) -> Tensor:
    """Return `x` in the type of autocast if it is on, except float64 and other kinds of numbers."""
    device = autocast_device(x)
    if not is_autocast(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context where operations run in the precision of their inputs, on the device of `x`."""
    device = autocast_device(x)
    # Entering torch's context costs microseconds even if autocast is off.
    return torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext()


def autocast_disabled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate the passes of an autograd function, so that they run without autocast.

    Autocast computes products in half precision but does not convert the tensors that they are written to. A
    backward pass may be called inside autocast, and the threads of `parallel_map` never
    inherit it.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        first = next((argument for argument in arguments if isinstance(argument, Tensor)), None)
        if first is None:  # all gradients of this backward pass are undefined
            return function(*arguments, **options)
        with without_autocast(first):
            return function(*arguments, **options)

    return run
