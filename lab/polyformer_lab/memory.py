"""Peak memory of one call: measured by the allocator on CUDA, in a fresh process on a CPU."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import torch

from polyformer.core.errors import InputError
from polyformer.core.measuring import MIB, peak_memory, reset_peak_memory
from polyformer.models.plugins import IMPORTED_NAMES, import_all
from polyformer_lab.bench.rows import AbsentError

Given = TypeVar("Given")


def peak_mib(make: Callable[[Given], Callable[[], object]], inputs: Given, warm: Given, device: str) -> float:
    """Return the MiB that the call `make(inputs)()` requires in addition to its inputs.

    `make` is a function of a module and `inputs` is plain data: on a CPU a separate process makes the call,
    so that earlier measurements do not count. It first runs the smaller call `warm`, which loads the
    libraries; without `warm`, the memory of loading counts too.

    Raises `MemoryError` if the call requires more memory than available.
    """
    if torch.device(device).type == "cuda":
        return _on_cuda(make(inputs))
    own = import_all, (tuple(IMPORTED_NAMES),)
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
    before = reset_peak_memory()
    call()
    return (peak_memory() - before) / MIB
