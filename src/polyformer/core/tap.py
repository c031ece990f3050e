"""Taps: records that code passes to collectors, per thread and task, not per model."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Tap(Generic[T]):
    """A place in the code where records of one kind may be collected; without a collector nothing is stored.

    with tap.collected() as records:
        model(ids)  # wherever it calls tap.show(record), `records` grows
    """

    def __init__(self, name: str):
        self._collector: contextvars.ContextVar[list[T] | None] = contextvars.ContextVar(name, default=None)

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[T]]:
        """Collect every record shown inside, in order; of nested collectors the innermost gets it."""
        records: list[T] = []
        token = self._collector.set(records)
        try:
            yield records
        finally:
            self._collector.reset(token)

    @property
    def records(self) -> list[T] | None:
        """The records so far; None without a collector, and in a traced graph, which cannot store a list."""
        return None if torch.compiler.is_compiling() else self._collector.get()

    def show(self, record: T) -> None:
        """Pass the record to the collector, if any."""
        records = self.records
        if records is not None:
            records.append(record)
