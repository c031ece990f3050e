"""A section of choices: read by the code that uses them, measured when first needed."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar, Generic, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops.tuning import store

C = TypeVar("C", bound=Config)

_lock = threading.RLock()

_adopted: store.Choices = {}


class Section(Generic[C]):
    """The choices of one part of the library.

    Args:
        name: the name in the file.
        fixed: the choices if measuring is not allowed: with `POLYFORMER_TUNING=fixed` and in deterministic
            mode (`torch.use_deterministic_algorithms`).
        measure: finds the best choices on this machine, for torch's current number of threads, within half a
            second; its tensors must be on the CPU and not use torch's generator. Other threads wait
            meanwhile, so it must not give work to threads that may read a section.
    """

    sections: ClassVar["dict[str, Section]"] = {}

    def __init__(self, name: str, fixed: C, measure: Callable[[], C]) -> None:
        self.name, self.fixed, self.measure = name, fixed, measure
        self.by_threads: dict[int, C] = {}
        self.imposed: C | None = None
        Section.sections[name] = self

    def __call__(self) -> C:
        """Return the current choices for this thread's number of threads."""
        if torch.are_deterministic_algorithms_enabled():
            return self.fixed
        if self.imposed is not None:
            return self.imposed
        choice = self.by_threads.get(torch.get_num_threads())
        return self._find() if choice is None else choice

    @contextlib.contextmanager
    def using(self, choice: C) -> Iterator[None]:
        """Use these choices in all threads while the body runs, instead of measured choices."""
        before, self.imposed = self.imposed, choice
        try:
            yield
        finally:
            self.imposed = before

    def key(self, threads: int | None = None) -> str:
        """Return the name of the choices in the file for a number of threads, by default this thread's."""
        threads = threads or torch.get_num_threads()
        return f"{self.name}, {threads} thread{'' if threads == 1 else 's'}"

    def measured(self) -> C:
        """Return the choices, measured now; the caller's modes and generators do not change."""
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.measure()

    def _find(self) -> C:
        with _lock:
            threads = torch.get_num_threads()
            if threads not in self.by_threads:
                self.by_threads[threads] = self._pinned_or_stored()
            return self.by_threads[threads]

    def _pinned_or_stored(self) -> C:
        pinned = store.pinned()
        if pinned is not None:
            return self._read(pinned) or self.fixed
        choice = self._read(_adopted) or self._read(store.stored())
        if choice is None:
            choice = self.measured()
            # If two processes measured at the same time, both use the choices of the first writer.
            choice = self._read({self.key(): store.store_choice(self.key(), choice.to_dict())}) or choice
        return choice

    def _read(self, choices: store.Choices) -> C | None:
        """Return this section's part of a file; None if it has none, or an invalid one."""
        try:
            return None if self.key() not in choices else type(self.fixed).from_dict(choices[self.key()])
        except InputError:
            return None


def recorded() -> store.Choices:
    """Return the choices that this process has used so far."""
    with _lock:
        return {
            section.key(threads): choice.to_dict()
            for section in Section.sections.values()
            for threads, choice in section.by_threads.items()
        }


@contextlib.contextmanager
def adopted(choices: store.Choices) -> Iterator[None]:
    """Let the recorded choices of a run override this machine's while the body runs.

    Only `POLYFORMER_TUNING` takes precedence over them.
    """
    global _adopted
    with _lock:
        before, _adopted = _adopted, choices
        measured = {section: dict(section.by_threads) for section in Section.sections.values()}
        forget()
    try:
        yield
    finally:
        with _lock:
            _adopted = before
            forget()
            for section, by_threads in measured.items():
                section.by_threads.update(by_threads)


def forget() -> None:
    """Forget all choices, as pins and files may have changed."""
    with _lock:
        for section in Section.sections.values():
            section.by_threads.clear()


def remeasured() -> store.Choices:
    """Return the choices of all sections, measured now for this thread's number of threads."""
    with _lock:
        return {section.key(): section.measured().to_dict() for section in Section.sections.values()}
