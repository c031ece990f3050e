"""Records about single tokens that a model passes to visualizations: buckets, clusters, experts, spans.

    record_mark("bucket, round 1", lambda: buckets[:, :, 0])

records a number for each token of a call. `record_lookup` records the entries that queries look up, and the
tokens that keys represent if the keys are not tokens. Without an observer nothing is computed, and a traced
graph records nothing.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from torch import Tensor

from polyformer.core.instrumentation import Recorder

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
