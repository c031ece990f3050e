"""What parts of a model say of single tokens to those who look inside: buckets, clusters, experts, spans.

Besides, what queries look up, and what keys that are not tokens stand for (`say`).

    mark("bucket, round 1", lambda: buckets[:, :, 0])

says so of all tokens of a call. Where nobody looks nothing is computed, and a traced graph says nothing.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from torch import Tensor

from polyformer.core.tap import Tap

Of = Literal["tokens", "queries", "keys"]

SINK = "share of the sink"
"""What of a query's attention goes to a score without a key, as gpt-oss learns for each head."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """A number for each token of a call.

    values: [B, H or 1, T]. Integers are labels, of which -1 is none, and floating numbers amounts. of:
    whether the T are queries, keys or, where these are the same tokens, both. names: of the labels 0, 1, ...,
    where they have any.
    """

    name: str
    values: Tensor
    of: Of = "tokens"
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """What queries of a call take in beside its keys: blocks sorted into a place, entries of a store.

    weights: [B, H, R, K], of what is taken in each of R places. entries: [B, H, R, K], which of the `count`
    that there are; None for all of them, in order. rows: [B, Tq], the place that each query reads, -1 for
    none; None where every query reads all places. tokens: [B, count, 2], the keys start <= j < stop that an
    entry is made of; None for what is no key of the call.
    """

    name: str
    weights: Tensor
    count: int
    entries: Tensor | None = None
    rows: Tensor | None = None
    tokens: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class SlotKeys:
    """Keys that are not tokens: each stands for the tokens start <= j < stop of `tokens` [B, S, 2]."""

    tokens: Tensor


Said = Mark | Lookup | SlotKeys

_tap: Tap[Said] = Tap("marks")


def marked() -> AbstractContextManager[list[Said]]:
    """Collects everything that is said inside, in order."""
    return _tap.collected()


def mark(name: str, values: Callable[[], Tensor], of: Of = "tokens", names: tuple[str, ...] = ()) -> None:
    """Says it to whoever collects; `values` is called only for them."""
    if _tap.records is not None:
        _tap.show(Mark(name, values().detach(), of, names))


def say(said: Callable[[], Lookup | SlotKeys]) -> None:
    """Says what is no number of each token; it is called only where somebody collects."""
    if _tap.records is not None:
        _tap.show(said())
