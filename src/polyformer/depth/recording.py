"""What is seen of depths from outside, and asked from outside: by thread and task, not by model."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch
from torch import Tensor

_records: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("depths", default=None)
_states: contextvars.ContextVar[list[list[Tensor]] | None] = contextvars.ContextVar("states", default=None)
_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("whole_depth", default=False)


@contextlib.contextmanager
def recorded_depths() -> Iterator[list[Tensor]]:
    """Collects how many layers each token went through, [B, T] for every call of a stack inside; 0 for
    padding."""
    records: list[Tensor] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def record_depths(depths: Tensor) -> None:
    """Shows the `depths` [B, T] of one call to whoever collects."""
    if torch.compiler.is_compiling():  # a traced graph keeps no list
        return
    records = _records.get()
    if records is not None:
        records.append(depths.detach())


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
    records: list[list[Tensor]] = []
    token = _states.set(records)
    try:
        with whole_depth():
            yield records
    finally:
        _states.reset(token)


def state_records() -> list[list[Tensor]] | None:
    """Where somebody collects states, those so far."""
    return None if torch.compiler.is_compiling() else _states.get()
