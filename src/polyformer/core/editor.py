"""Instrumentation: code passes values to a function that may replace them, per thread and task."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Editor(Generic[T]):
    """Lets a caller replace one kind of value in the code; otherwise values pass unchanged.

    with editor.editing(change):
        model(ids)  # each `editor.edit(value)` of the code returns `change(value)`
    """

    def __init__(self, name: str):
        self._change: contextvars.ContextVar[Callable[[T], T] | None] = contextvars.ContextVar(
            name, default=None
        )

    @contextlib.contextmanager
    def editing(self, change: Callable[[T], T]) -> Iterator[None]:
        """Apply `change` to the values within the context, after the changes of outer contexts."""
        outer = self._change.get()
        token = self._change.set(change if outer is None else lambda value: change(outer(value)))
        try:
            yield
        finally:
            self._change.reset(token)

    def edit(self, value: T) -> T:
        """Return the value, changed inside a context; a traced graph keeps the value."""
        change = None if torch.compiler.is_compiling() else self._change.get()
        return value if change is None else change(value)
