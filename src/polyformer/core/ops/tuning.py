"""Choices of the fastest way on this machine: measured once and cached, the same for every run.

A `Section` holds the choices of one part of the library: the library that computes a product, or the number
of queries in a tile. It is measured when first needed, in a fraction of a second, and cached by processor,
threads and versions. `POLYFORMER_TUNING` pins all sections: "fixed" to the choices in the code, a file name
to the output of `polyformer tune --out FILE`. Different choices round differently: a training run records its
choices and resumes with them.

The file of choices is in the user's cache folder; a damaged file counts as missing.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import filelock
import torch
from torch.utils._python_dispatch import _disable_current_modes

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write, json_bytes, read_json
from polyformer.core.paths import cache_folder

CORE_CACHE = 1 << 20
"""Bytes of a core's private cache if the system does not report it."""

LAST_CACHE = 32 << 20
"""Bytes of the last-level cache if the system does not report it."""


@functools.cache
def processor() -> str:
    """Return name, family and model: virtual machines give different processors the same name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [facts[key] for key in ("cpu family", "model") if key in facts]
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def instruction_set() -> str:
    """Return the widest vectors that torch may use ("AVX512", "AVX2"), and oneDNN's limit if one is set."""
    own = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    return f"{own}, oneDNN up to {limit}" if limit else own


@functools.cache
def core_cache() -> int:
    """Return the bytes of the second-level cache, which is private to a core on current processors."""
    return _size("SC_LEVEL2_CACHE_SIZE", CORE_CACHE)


@functools.cache
def last_cache() -> int:
    """Return the bytes of the last-level cache shared by one processor's cores."""
    return _size("SC_LEVEL3_CACHE_SIZE", LAST_CACHE)


def _size(name: str, default: int) -> int:
    """Return the value that the system reports, or `default`."""
    try:
        size = os.sysconf(name)
    except (AttributeError, ValueError, OSError):
        return default
    return size if size > 0 else default


def description() -> dict[str, str]:
    """Return all properties that identify the choices, except the number of threads."""
    return {
        "processor": processor(),
        "instruction set": instruction_set(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "polyformer": importlib.metadata.version("polyformer"),
    }


K = TypeVar("K")

MOST_READ = 128 << 20
"""The most bytes that `cache_emptier` reads."""


def cache_emptier() -> Callable[[], object]:
    """Return a function that reads other memory, so that a weight leaves the caches between two calls."""
    return torch.ones(min(2 * last_cache(), MOST_READ) // 4, device="cpu", dtype=torch.float32).sum


def least_seconds(
    calls: Mapping[K, Callable[[], object]],
    rounds: int,
    decided: Callable[[Mapping[K, float]], bool] = lambda least: False,
    before: Callable[[], object] | None = None,
) -> dict[K, float]:
    """Return the shortest of `rounds` runs of each call, all in turn, after a warm-up run.

    The shortest, because other load on the machine can only lengthen a run. The warm-up allocates memory, and
    oneDNN compiles its kernels. No more rounds are run once the results are `decided`. before: runs before
    each call, untimed, for example to empty the caches.
    """
    least = dict.fromkeys(calls, float("inf"))
    for turn in range(rounds + 1):
        for key, call in calls.items():
            if before is not None:
                before()
            start = time.perf_counter()
            call()
            if turn:
                least[key] = min(least[key], time.perf_counter() - start)
        if turn and decided(least):
            break
    return least


PIN = "POLYFORMER_TUNING"
FIXED = "fixed"

Choices = dict[str, dict[str, Any]]
"""The choices of sections, by name and threads: "products, 2 threads"."""


def path() -> Path:
    """Return the file of this machine."""
    key = hashlib.sha256(json.dumps(description(), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "tuning" / f"{key}.json"


def load(file: Path) -> Choices:
    """Return the choices in the file; raises `InputError` if it is missing or damaged."""
    data = read_json(file, dict)
    choices = data.get("choices")
    if not isinstance(choices, dict) or not all(isinstance(part, dict) for part in choices.values()):
        raise InputError(f"{file}: not a file written by polyformer tune")
    return choices


def stored() -> Choices:
    """Return this machine's choices so far; empty if the file is missing, damaged or unreadable."""
    try:
        return load(path())
    except (InputError, OSError):
        return {}


def store_choice(name: str, choice: dict[str, Any]) -> dict[str, Any]:
    """Add a choice to this machine's file; a choice that another process wrote first is kept and returned.

    A file that cannot be written is not an error: the next process will measure again.
    """
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(file.with_suffix(".lock"), timeout=10):
            choices = stored()
            if name in choices:
                return choices[name]
            save(file, {**choices, name: choice})
    except (InputError, OSError, RuntimeError):  # RuntimeError: there is no home folder
        pass
    return choice


def save(file: Path, choices: Choices) -> None:
    """Write the file atomically."""
    atomic_write(file, as_json(choices))


def as_json(choices: Choices) -> bytes:
    """Return the content of a file of choices."""
    return json_bytes({"machine": description(), "choices": choices})


def pinned() -> Choices | None:
    """Return the choices that `POLYFORMER_TUNING` pins, {} for the fixed choices; None for no pin."""
    pin = os.environ.get(PIN)
    if not pin:
        return None
    if pin == FIXED:
        return {}
    try:
        return load(Path(pin))
    except (InputError, OSError) as error:
        raise InputError(
            f'{PIN}: expected "{FIXED}" or a file of polyformer tune --out, got {quote(pin)}: {error}'
        ) from error


C = TypeVar("C", bound=Config)

_lock = threading.RLock()

_adopted: Choices = {}


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
        choices = pinned()
        if choices is not None:
            return self._read(choices) or self.fixed
        choice = self._read(_adopted) or self._read(stored())
        if choice is None:
            choice = self.measured()
            # If two processes measured at the same time, both use the choices of the first writer.
            choice = self._read({self.key(): store_choice(self.key(), choice.to_dict())}) or choice
        return choice

    def _read(self, choices: Choices) -> C | None:
        """Return this section's part of a file; None if it has none, or an invalid one."""
        try:
            return None if self.key() not in choices else type(self.fixed).from_dict(choices[self.key()])
        except InputError:
            return None


def recorded() -> Choices:
    """Return the choices that this process has used so far."""
    with _lock:
        return {
            section.key(threads): choice.to_dict()
            for section in Section.sections.values()
            for threads, choice in section.by_threads.items()
        }


@contextlib.contextmanager
def adopted(choices: Choices) -> Iterator[None]:
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


def remeasured() -> Choices:
    """Return the choices of all sections, measured now for this thread's number of threads."""
    with _lock:
        return {section.key(): section.measured().to_dict() for section in Section.sections.values()}


__all__ = ["Section", "adopted", "recorded"]
