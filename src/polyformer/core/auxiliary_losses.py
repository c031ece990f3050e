"""What parts of a model add to its training loss: a part names a term, the model collects and adds it.

    with penalties() as found:      # around the stacks, in the model
        ...
            penalize("span", term)  # anywhere inside

A part computes its term whether or not somebody collects it, so that recomputed activations are the same.
Collectors stand in a plain list, which a traced graph can follow; a process runs one model at a time.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

Penalties = dict[str, Tensor]
"""Scalars to add to the loss, by name; layers that use one name add up."""

_collectors: list[Penalties] = []


@contextlib.contextmanager
def penalties() -> Iterator[Penalties]:
    """Collects the terms that are named inside; an inner collector keeps its own to itself."""
    found: Penalties = {}
    _collectors.append(found)
    try:
        yield found
    finally:
        _collectors.pop()


def joined(*found: Penalties) -> Penalties:
    """The terms of several collectors, those of one name added up."""
    with penalties() as total:
        for one in found:
            for name, term in one.items():
                penalize(name, term)
    return total


def penalize(name: str, term: Tensor) -> None:
    """Hands the scalar `term` to whoever collects."""
    if _collectors:
        found = _collectors[-1]
        found[name] = found[name] + term if name in found else term
