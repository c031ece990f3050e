"""What processes send one another for attention, counted in bytes where somebody asks."""

import dataclasses
from contextlib import AbstractContextManager

from polyformer.core.tap import Tap


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One exchange as this process sees it: what it was for, and the bytes that it sent and received."""

    what: str
    sent: int
    received: int


_tap: Tap[Transfer] = Tap("transfers")


def counted_transfers() -> AbstractContextManager[list[Transfer]]:
    """Collects the exchanges inside, in order; those of the backward pass too, where it runs inside."""
    return _tap.collected()


def count_transfer(what: str, sent: int, received: int) -> None:
    """Shows an exchange to whoever collects."""
    _tap.show(Transfer(what, sent, received))
