"""Calls of `attend` in a graph that is exported for texts of any length.

The length is unknown while such a graph is traced, so a plan must not depend on it: whether a mask is small,
or which intervals of keys a layout lists. The exporter sets a limit on the length and reads the plans.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True)
class GraphCalls:
    """The calls of a graph. longest: the most tokens of a text. plans: of all calls so far, as texts."""

    longest: int
    plans: list[str] = dataclasses.field(default_factory=list)


_current: contextvars.ContextVar[GraphCalls | None] = contextvars.ContextVar("graph_calls", default=None)


@contextlib.contextmanager
def graph_calls(longest: int) -> Iterator[GraphCalls]:
    """Plan the calls inside for all texts of up to `longest` tokens, and yield the record of their plans."""
    token = _current.set(calls := GraphCalls(longest))
    try:
        yield calls
    finally:
        _current.reset(token)


def current_graph_calls() -> GraphCalls | None:
    """Return the record of the graph that is exported now; None outside of an export."""
    # Dynamo, which traces Python code, cannot read a context variable; the exporter does not use it.
    if torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting():
        return None
    return _current.get()
