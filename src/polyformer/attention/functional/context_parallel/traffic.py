"""Counting of the bytes that processes exchange for attention."""

import dataclasses
from contextlib import AbstractContextManager

from polyformer.core.instrumentation import Recorder


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A single exchange of this process: its purpose and the bytes sent and received."""

    what: str
    sent: int
    received: int


_recorder: Recorder[Transfer] = Recorder("transfers")


def counted_transfers() -> AbstractContextManager[list[Transfer]]:
    """Collect the exchanges in the context, in order, including a backward pass that runs in it."""
    return _recorder.collect()


def count_transfer(what: str, sent: int, received: int) -> None:
    """Pass an exchange to all active collectors."""
    _recorder.record(Transfer(what, sent, received))
