"""Auxiliary losses: what layers add to the training loss. A layer names a term, the model collects it.

    with collect_auxiliary_losses() as losses:  # around the stacks, in the model
        ...
            add_auxiliary_loss("span", term)    # anywhere inside

A layer computes its term whether or not somebody collects it, so that recomputed activations are the same.
Each thread has collectors of its own, in a plain list, which a traced graph can follow.
"""

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

AuxiliaryLosses = dict[str, Tensor]
"""Scalars to add to the loss, by name; terms of one name, from several layers, add up."""


class _Collectors(threading.local):
    """The collectors of this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[AuxiliaryLosses] = []


_collectors = _Collectors()


@contextlib.contextmanager
def collect_auxiliary_losses() -> Iterator[AuxiliaryLosses]:
    """Collects the terms that this thread adds inside; an inner collector keeps its own to itself."""
    losses: AuxiliaryLosses = {}
    _collectors.stack.append(losses)
    try:
        yield losses
    finally:
        _collectors.stack.pop()


def add_auxiliary_loss(name: str, term: Tensor) -> None:
    """Adds the scalar `term` to the innermost collector of this thread; without one it is dropped."""
    if _collectors.stack:
        losses = _collectors.stack[-1]
        losses[name] = losses[name] + term if name in losses else term


def sum_auxiliary_losses(*collected: AuxiliaryLosses) -> AuxiliaryLosses:
    """The terms of several collectors, those of one name added up."""
    with collect_auxiliary_losses() as total:
        for losses in collected:
            for name, term in losses.items():
                add_auxiliary_loss(name, term)
    return total
