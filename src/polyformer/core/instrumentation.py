"""Instrumentation of the code, per thread and task: observers of records, and functions that change values.

Code that something may watch or change asks `installed` first, which is empty in ordinary runs.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import ClassVar, Generic, TypeVar

import torch

T = TypeVar("T")

installed: "list[Recorder | Editor]" = []
"""The recorders and editors in use, in any thread; empty in ordinary runs."""


class Recorder(Generic[T]):
    """Records one kind of object in the code while an observer collects them; otherwise stores nothing.

    with recorder.collect() as records:
        model(ids)  # each call of recorder.record(record) appends to `records`
    """

    recorders: ClassVar["list[Recorder]"] = []

    def __init__(self, name: str):
        self.recorders.append(self)
        self._records: contextvars.ContextVar[list[T] | None] = contextvars.ContextVar(name, default=None)

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[T]]:
        """Collect all records within the context, in order; of nested contexts the innermost gets them."""
        records: list[T] = []
        token = self._records.set(records)
        installed.append(self)
        try:
            yield records
        finally:
            installed.remove(self)
            self._records.reset(token)

    @property
    def records(self) -> list[T] | None:
        """The records so far; None without an observer, and in a traced graph, which cannot store a list."""
        return None if torch.compiler.is_compiling() else self._records.get()

    def record(self, record: T) -> None:
        """Pass the record to the observer, if any."""
        records = self.records
        if records is not None:
            records.append(record)


def collecting() -> bool:
    """Return whether any records are being collected."""
    return any(recorder.records is not None for recorder in Recorder.recorders)


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
        installed.append(self)
        try:
            yield
        finally:
            installed.remove(self)
            self._change.reset(token)

    def edit(self, value: T) -> T:
        """Return the value, changed inside a context; a traced graph keeps the value."""
        change = None if torch.compiler.is_compiling() else self._change.get()
        return value if change is None else change(value)
