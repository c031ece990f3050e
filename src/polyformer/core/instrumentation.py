"""Instrumentation of the code, per thread and task: observers of records, and functions that change values.

Code that something may watch or change asks `installed` first, which is empty in ordinary runs.

A model passes records about single tokens to visualizations: buckets, clusters, experts, spans.

    record_mark("bucket, round 1", lambda: buckets[:, :, 0])

records a number for each token of a call. `record_lookup` records the entries that queries look up, and the
tokens that keys represent if the keys are not tokens. Without an observer nothing is computed, and a traced
graph records nothing.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

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


Of = Literal["tokens", "queries", "keys"]

SINK = "share of the sink"
"""The share of a query's attention on a score without a key, as gpt-oss learns for each head."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """A number for each token of a call.

    values: [B, H or 1, T]. Integers are labels, with -1 for none; floating-point numbers are amounts. of:
    whether the T tokens are queries, keys or, for self-attention, both. names: the names of the labels 0, 1,
    ..., if they have any.
    """

    name: str
    values: Tensor
    of: Of = "tokens"
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """Further inputs of a call's queries next to its keys: blocks sorted into a place, entries of a store.

    weights: [B, H, R, K], of the entries at each of R places. entries: [B, H, R, K], their indices among the
    `count` entries; None for all entries, in order. rows: [B, Tq], the place that each query reads, -1 for
    none; None if every query reads all places. tokens: [B, count, 2], the keys start <= j < stop that an
    entry was computed from; None if they are not keys of the call.
    """

    name: str
    weights: Tensor
    count: int
    entries: Tensor | None = None
    rows: Tensor | None = None
    tokens: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class SlotKeys:
    """Keys that are not tokens: each represents the tokens start <= j < stop of `tokens` [B, S, 2]."""

    tokens: Tensor


TokenRecord = Mark | Lookup | SlotKeys

_recorder: Recorder[TokenRecord] = Recorder("marks")


def collect_marks() -> AbstractContextManager[list[TokenRecord]]:
    """Collect all records of tokens within the context, in order."""
    return _recorder.collect()


def record_mark(
    name: str, values: Callable[[], Tensor], of: Of = "tokens", names: tuple[str, ...] = ()
) -> None:
    """Record a number for each token; `values` is called only if there is an observer."""
    if _recorder.records is not None:
        _recorder.record(Mark(name, values().detach(), of, names))


def record_lookup(lookup: Callable[[], Lookup | SlotKeys]) -> None:
    """Record a lookup or slot keys; `lookup` is called only if there is an observer."""
    if _recorder.records is not None:
        _recorder.record(lookup())
