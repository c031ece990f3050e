"""Peak memory of one call: of the allocator on CUDA, of a fresh process on a CPU."""

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

from polyformer.bench.benchmark_case import AbsentError
from polyformer.core.errors import InputError
from polyformer.plugins import NAMED, import_all

MIB = 1 << 20
Given = TypeVar("Given")


def peak_mib(make: Callable[[Given], Callable[[], object]], inputs: Given, warm: Given, device: str) -> float:
    """MiB that the call `make(inputs)()` needs beside its inputs.

    `make` is a function of a module and `inputs` plain data: on a CPU a process of its own does the work, so
    that nothing measured before is counted. It first runs the smaller `warm`, for what libraries load; where
    there is no such call, their loading counts too.

    Raises `MemoryError` where it needs more than there is.
    """
    if torch.device(device).type == "cuda":
        return _on_cuda(make(inputs))
    own = import_all, (tuple(NAMED),)
    with ProcessPoolExecutor(1, get_context("spawn"), *own) as pool:
        try:
            return pool.submit(_in_process, make, inputs, warm, torch.get_num_threads()).result()
        except BrokenProcessPool:  # the system has ended it
            raise MemoryError("it needs more memory than there is") from None


def _on_cuda(call: Callable[[], object]) -> float:
    call()  # compiled and tuned first
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def _in_process(
    make: Callable[[Given], Callable[[], object]], inputs: Given, warm: Given, threads: int
) -> float:
    torch.set_num_threads(threads)
    with contextlib.suppress(AbsentError, InputError):
        make(warm)()
    call = make(inputs)
    before = reset_high_water()
    call()
    return (high_water() - before) / MIB


def reset_high_water() -> int:
    """The resident bytes now; where the system allows it, the high-water mark starts again from here."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return high_water()


def high_water() -> int:
    """The most bytes that were resident at once."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.exists():  # what clear_refs resets
        most = next(
            int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
    return most * (1 if sys.platform == "darwin" else 1024)
