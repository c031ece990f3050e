"""Autograd functions: the precision of their computation, and their gradients of second order.

They compute in the precision of their tensors, instead of autocast's.

A hand-written backward pass returns numbers without a graph. Autograd would silently omit their part of a
second-order gradient: torch's `once_differentiable` raises an error only in `.backward()`. So these passes
raise an error as soon as a graph of gradients is requested (`create_graph=True`).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError

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


DEFINITION = (
    'compute it with backend="definition", as in attend(..., backend="definition") or, for all layers of a '
    'model, create_model(name, backend="definition")'
)
"""The alternative if attention has a plain equation, which autograd differentiates any number of times."""

WHOLE = 'compute whole sequences in one process, with backend="definition"'
"""The alternative if a sequence is spread over processes."""


def refuse_second_order(what: str, way_out: str = DEFINITION) -> None:
    """Raise `InputError` if the backward pass in progress will be differentiated again.

    For use inside a backward pass: autograd enables gradients there if `create_graph=True`.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise InputError(f"create_graph=True: {what} gives no second-order gradients; {way_out}")


def first_order(what: str, way_out: str = DEFINITION) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for the `backward` of an autograd function that cannot be differentiated again.

    Args:
        what: the name of the computation, for the error.
        way_out: what to use instead.
    """

    def decorate(backward: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(backward)
        def run(*arguments: P.args, **options: P.kwargs) -> R:
            refuse_second_order(what, way_out)
            return backward(*arguments, **options)

        return run

    return decorate


def mark_first_order(out: Tensor, what: str) -> None:
    """Make the backward pass through `out` refuse second-order gradients.

    For operations of torch that do not support them: their errors name no alternative, or they return NaN.
    Tracers and `torch.func`, which sets `create_graph` for first-order gradients too, keep torch's behaviour.
    """
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if out.requires_grad and not traced and not torch._C._are_functorch_transforms_active():
        out.register_hook(lambda grad: refuse_second_order(what))
