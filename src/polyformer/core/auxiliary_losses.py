"""Auxiliary losses: terms that layers add to the training loss. A layer names a term, the model collects it.

    with collect_auxiliary_losses() as losses:  # around the stacks, in the model
        ...
            add_auxiliary_loss("span", term)    # anywhere inside

A layer computes its term even if nobody collects it, so that recomputed activations are the same. Each thread
has separate collectors, in a plain list, which can be traced into a graph.
"""

import threading
from contextlib import AbstractContextManager

from torch import Tensor

AuxiliaryLosses = dict[str, Tensor]
"""Scalars to add to the loss, by name; terms with the same name, from several layers, are summed."""


class _Collectors(threading.local):
    """The collectors of this thread, with the innermost last."""

    def __init__(self) -> None:
        self.stack: list[AuxiliaryLosses] = []


_collectors = _Collectors()


class _Collection:
    """The context of `collect_auxiliary_losses`; a generator would take longer, in every pass."""

    def __enter__(self) -> AuxiliaryLosses:
        losses: AuxiliaryLosses = {}
        _collectors.stack.append(losses)
        return losses

    def __exit__(self, *error: object) -> None:
        _collectors.stack.pop()


def collect_auxiliary_losses() -> AbstractContextManager[AuxiliaryLosses]:
    """Collect the terms that this thread adds inside; an inner collector does not pass its terms on."""
    return _Collection()


def add_auxiliary_loss(name: str, term: Tensor) -> None:
    """Add the scalar `term` to the innermost collector of this thread; without a collector it is dropped."""
    if _collectors.stack:
        losses = _collectors.stack[-1]
        losses[name] = losses[name] + term if name in losses else term


def sum_auxiliary_losses(*collected: AuxiliaryLosses) -> AuxiliaryLosses:
    """Return the terms of several collectors, summed by name."""
    with collect_auxiliary_losses() as total:
        for losses in collected:
            for name, term in losses.items():
                add_auxiliary_loss(name, term)
    return total
