"""Recording and control of depths for a thread and task, independent of the model."""

import contextlib
import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polyformer.core.instrumentation import Recorder

_depths: Recorder[Tensor] = Recorder("depths")
_states: Recorder[list[Tensor]] = Recorder("states")
_full: contextvars.ContextVar[bool] = contextvars.ContextVar("full_depth", default=False)


def recorded_depths() -> AbstractContextManager[list[Tensor]]:
    """Collect the number of layers of each token, [B, T] for every call of a stack; 0 for padding."""
    return _depths.collect()


def record_depths(depths: Tensor) -> None:
    """Pass the `depths` [B, T] of a call to active recordings."""
    _depths.record(depths.detach())


@contextlib.contextmanager
def full_depth(full: bool = True) -> Iterator[None]:
    """Disable early exits of tokens inside `with`."""
    token = _full.set(full)
    try:
        yield
    finally:
        _full.reset(token)


def is_full_depth() -> bool:
    """Return whether early exits are disabled."""
    return not torch.compiler.is_compiling() and _full.get()


@contextlib.contextmanager
def recorded_states() -> Iterator[list[list[Tensor]]]:
    """Collect the states [B, T, E] after every exit's layer and after the last layer (before the final norm),
    in a list for each call of a stack with exits inside `with`. Early exits are disabled there."""
    with full_depth(), _states.collect() as records:
        yield records


def state_records() -> list[list[Tensor]] | None:
    """Return the states that were recorded so far; None without a recording."""
    return _states.records
