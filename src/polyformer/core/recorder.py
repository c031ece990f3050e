"""Instrumentation: code passes records to an observer, per thread and task, not per model."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import ClassVar, Generic, TypeVar

import torch

T = TypeVar("T")


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
        try:
            yield records
        finally:
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
