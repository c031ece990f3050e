"""Signals that ask a run to save: heeded at the end of the step under way.

SIGINT (Ctrl-C) and SIGTERM (a cluster that takes the machine away): write a checkpoint and stop. A second
SIGINT stops at once. SIGUSR1 (a cluster's warning some time before, such as Slurm's --signal=USR1@120): write
a checkpoint and go on, so that the time that is left is not lost; the SIGTERM that follows writes another.
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
    """A handler that does nothing; unlike SIG_IGN it is not inherited by programs that are started."""


DEFAULTS = (signal.SIG_DFL, signal.default_int_handler, ignore)


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run after `step`, whose checkpoint is written."""

    def __init__(self, number: int, step: int) -> None:
        self.signal, self.step = signal.Signals(number), step
        super().__init__(f"stopped by {self.signal.name} at step {step}, of which a checkpoint is written")


@dataclass(frozen=True)
class Asked:
    """What signals have asked for: the number of one that stops the run, or 0; a checkpoint now.

    failed: whether a checkpoint could not be written in the background, of which processes hear with it.
    """

    stop: int = 0
    save: bool = False
    failed: bool = False


class Signals:
    """While it is entered, remembers signals instead of dying of them. Handlers of the program's own stay.

    Only a program's main thread can handle signals; in any other this does nothing.
    """

    def __init__(self) -> None:
        self.asked = Asked()
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

    def take(self) -> Asked:
        """What has been asked for; a checkpoint is asked for once."""
        asked, self.asked = self.asked, Asked(self.asked.stop)
        return asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == WARNING:
            self.asked = Asked(self.asked.stop, save=True)
            return
        if number == signal.SIGINT and self.asked.stop == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = Asked(number, self.asked.save)
        name = signal.Signals(number).name
        # Not print: the signal may have come in the middle of one.
        text = f"\npolyformer: {name}: stopping after this step" + (
            " (once more to stop at once)\n" if number == signal.SIGINT else "\n"
        )
        with suppress(OSError):
            os.write(2, text.encode())


@contextmanager
def surviving_warnings() -> Iterator[None]:
    """A SIGUSR1 while data are read or results are written, when there is nothing to save, kills nobody."""
    main = threading.current_thread() is threading.main_thread()
    if WARNING is None or not main or signal.getsignal(WARNING) is not signal.SIG_DFL:
        yield
        return
    before = signal.signal(WARNING, ignore)
    try:
        yield
    finally:
        signal.signal(WARNING, before)
