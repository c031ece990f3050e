"""Marks: data about single tokens that parts of a model show to visualizations: buckets, clusters, experts,
spans.

    mark("bucket, round 1", lambda: buckets[:, :, 0])

marks all tokens of a call. `say` shows the entries that queries look up, and the tokens behind keys that are
not tokens. Without a collector nothing is computed, and a traced graph shows nothing.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from torch import Tensor

from polyformer.core.tap import Tap

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


Said = Mark | Lookup | SlotKeys

_tap: Tap[Said] = Tap("marks")


def marked() -> AbstractContextManager[list[Said]]:
    """Collect all marks and lookups shown inside, in order."""
    return _tap.collected()


def mark(name: str, values: Callable[[], Tensor], of: Of = "tokens", names: tuple[str, ...] = ()) -> None:
    """Pass a mark to the collector; `values` is called only if there is a collector."""
    if _tap.records is not None:
        _tap.show(Mark(name, values().detach(), of, names))


def say(said: Callable[[], Lookup | SlotKeys]) -> None:
    """Pass a lookup or slot keys to the collector; `said` is called only if there is a collector."""
    if _tap.records is not None:
        _tap.show(said())
