"""What is seen of depths from outside, and asked from outside: by thread and task, not by model."""

import contextlib
import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polyformer.core.tap import Tap

_depths: Tap[Tensor] = Tap("depths")
_states: Tap[list[Tensor]] = Tap("states")
_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("whole_depth", default=False)


def recorded_depths() -> AbstractContextManager[list[Tensor]]:
    """Collects how many layers each token went through, [B, T] for every call of a stack inside; 0 for
    padding."""
    return _depths.collected()


def record_depths(depths: Tensor) -> None:
    """Shows the `depths` [B, T] of one call to whoever collects."""
    _depths.show(depths.detach())


@contextlib.contextmanager
def whole_depth(whole: bool = True) -> Iterator[None]:
    """No token exits early inside."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def is_whole() -> bool:
    """Whether somebody asked for all layers."""
    return not torch.compiler.is_compiling() and _whole.get()


@contextlib.contextmanager
def recorded_states() -> Iterator[list[list[Tensor]]]:
    """Collects the states [B, T, E] after every exit's layer and, before the final norm, after the last, a
    list for each call of a stack with exits inside; no token exits early there."""
    with whole_depth(), _states.collected() as records:
        yield records


def state_records() -> list[list[Tensor]] | None:
    """Where somebody collects states, those so far."""
    return _states.records
