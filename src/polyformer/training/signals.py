"""Signals that request a checkpoint, handled at the end of the current step.

SIGINT (Ctrl-C) and SIGTERM (for example from a cluster that reclaims the machine): write a checkpoint and
stop. A second SIGINT stops immediately. SIGUSR1 (an early warning of a cluster, such as Slurm's
--signal=USR1@120): write a checkpoint and continue, to use the remaining time; the SIGTERM that follows
writes another checkpoint.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

STOP = (signal.SIGINT, signal.SIGTERM)
WARNING = getattr(signal, "SIGUSR1", None)  # Windows has none


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing, as a signal handler; unlike SIG_IGN it is not inherited by child processes."""


DEFAULTS = (signal.SIG_DFL, signal.default_int_handler, ignore)


class Interrupted(KeyboardInterrupt):
    """The exception for a run that a signal stopped after `step`; the checkpoint of `step` is written."""

    def __init__(self, number: int, step: int) -> None:
        self.signal, self.step = signal.Signals(number), step
        super().__init__(f"stopped by {self.signal.name} at step {step}, of which a checkpoint is written")


@dataclass(frozen=True)
class SignalRequests:
    """The requests of signals: `stop` the run, by the number of the signal or 0; `save` a checkpoint now.

    failed: whether a checkpoint could not be written in the background; processes share it with the requests.
    """

    stop: int = 0
    save: bool = False
    failed: bool = False


class Signals:
    """A context that records signals instead of terminating. Handlers set by the program are kept.

    Only the main thread of a program can handle signals; in any other thread this does nothing.
    """

    def __init__(self) -> None:
        self.asked = SignalRequests()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP, *((WARNING,) if WARNING else ())):
                if signal.getsignal(number) in DEFAULTS:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> SignalRequests:
        """Return the requests so far; a request for a checkpoint is returned only once."""
        asked, self.asked = self.asked, SignalRequests(self.asked.stop)
        return asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == WARNING:
            self.asked = SignalRequests(self.asked.stop, save=True)
            return
        if number == signal.SIGINT and self.asked.stop == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = SignalRequests(number, self.asked.save)
        name = signal.Signals(number).name
        # os.write instead of print, because the signal may have interrupted a print.
        again = " (again to stop immediately)" if number == signal.SIGINT else ""
        with suppress(OSError):
            os.write(2, f"\npolyformer: {name}: stopping after this step{again}\n".encode())


@contextmanager
def ignore_sigusr1() -> Iterator[None]:
    """Ignore SIGUSR1 while data are read or results are written, because there is no progress to save."""
    main = threading.current_thread() is threading.main_thread()
    if WARNING is None or not main or signal.getsignal(WARNING) is not signal.SIG_DFL:
        yield
        return
    before = signal.signal(WARNING, ignore)
    try:
        yield
    finally:
        signal.signal(WARNING, before)
