"""Second-order gradients, and errors if a custom backward pass does not support them.

A hand-written backward pass returns numbers without a graph. Autograd would silently omit their part of a
second-order gradient: torch's `once_differentiable` raises an error only in `.backward()`. So these passes
raise an error as soon as a graph of gradients is requested (`create_graph=True`).
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

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
