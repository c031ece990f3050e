"""The threads and the memory pages of a CPU.

Pages have 2 MiB, if the system supports them. The addresses of 4 KiB pages do not fit into a core's TLB, so a
loop over hundreds of megabytes would need an address look-up every few cache lines.

Work is divided among a few threads, each computing its items independently. torch divides every operation
among its threads and waits for the last of them: a thousand small operations wait a thousand times, and on a
busy machine each wait costs a scheduling delay. Here each thread computes its items from beginning to end.
"""

import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

ADVISE, COLLAPSE = 14, 25
"""Linux's MADV_HUGEPAGE, for future pages, and MADV_COLLAPSE (Linux 6.1), for existing pages."""

PAGE = 1 << 21


def use_huge_pages(address: int, size: int) -> None:
    """Request huge pages for `size` bytes at `address`; the content never changes."""
    start, stop = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    madvise = _madvise()
    if madvise is not None and start < stop:
        for advice in (ADVISE, COLLAPSE):
            madvise(start, stop - start, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


SMALL_MATRIX = 1 << 16
"""The most numbers in a matrix with products that are finished before threads have been woken.

The cost of waking depends on other load on the machine, which nobody can measure in advance, not on the
processor.
"""

WORKERS = 4
"""The most threads: Python runs one thread at a time, so more would not help on any processor."""

CPU = torch.device("cpu")

Item = TypeVar("Item")
Result = TypeVar("Result")


def suitable_threads(model: nn.Module) -> int:
    """Return the number of CPU threads for `model`: 1 if all matrices are small, else torch's choice.

    In tiny products each thread has microseconds of work, and on a busy machine the others wait for it as
    long as the operating system runs other processes: two threads have been several times slower than one.
    Token tables do not count: they are looked up, and as the output layer they are one product among many.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes = (x.numel() for x in model.parameters() if x.dim() > 1 and id(x) not in tables)
    return 1 if max(sizes, default=0) <= SMALL_MATRIX else torch.get_num_threads()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use this number of threads in torch's products while the body runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def model_threads(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context with the number of threads that suits `model`."""
    return threads(suitable_threads(model))


def parallel_map(
    function: Callable[[Sequence[Item]], Result], items: Sequence[Item], device: torch.device = CPU
) -> list[Result]:
    """Return the results of `function` on consecutive groups of `items`, in order, one group per thread.

    A single group, in the calling thread, if there is one thread or item, or if a dispatch mode observes this
    thread's operations; also if the tensors are on another `device`: workers would not use the stream of this
    thread, and the device is the limit. Gradients are not recorded.
    """
    threads = torch.get_num_threads()
    workers = min(threads, WORKERS, len(items))
    if workers < 2 or device.type != "cpu" or is_in_torch_dispatch_mode():
        return [function(items)]
    inference = torch.is_inference_mode_enabled()

    def work(group: Sequence[Item]) -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return function(group)

    edges = [len(items) * i // workers for i in range(workers + 1)]
    pool = _pool(os.getpid(), workers, threads)
    futures = [pool.submit(work, items[a:b]) for a, b in itertools.pairwise(edges)]
    return [future.result() for future in futures]


@functools.lru_cache(maxsize=WORKERS)
def _pool(process: int, workers: int, threads: int) -> ThreadPoolExecutor:
    """Return workers that share torch's `threads`; a forked process makes new ones."""
    pool = ThreadPoolExecutor(workers, "attend", initializer=_set_threads, initargs=(threads // workers,))
    ready = threading.Barrier(workers + 1)
    for _ in range(workers):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(threads)  # the workers' setting would also be the default of later threads
    return pool


def _set_threads(threads: int) -> None:
    torch.get_num_threads()  # torch sets up a new thread on first use and overrides earlier settings
    torch.set_num_threads(threads)
