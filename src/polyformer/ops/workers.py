"""Work spread over a few threads of a CPU, each of which computes alone.

torch splits every operation among its threads and waits for the last of them: a thousand small operations
wait a thousand times, and on a busy machine each wait costs as much as the operating system pleases. Here
each thread computes its own items from beginning to end.
"""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

SMALL_MATRIX = 1 << 16
"""Matrices of at most so many numbers make products that are over before threads have been woken. Other work
on the machine decides what waking costs, not the processor, and how much there will be nobody can measure."""

WORKERS = 4
"""At most so many: Python runs one thread at a time, which more of them would feel on any processor."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def usual_threads(model: nn.Module) -> int:
    """How many threads of a CPU suit `model`: one if all of its matrices are small, else torch's choice.

    Of tiny products each thread has microseconds to do, and on a busy machine it is waited for as long as the
    operating system lets others run: two threads have been several times slower than one. Tables of tokens do
    not count: they are looked up, and as the output layer are one product of many.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes = (x.numel() for x in model.parameters() if x.dim() > 1 and id(x) not in tables)
    return 1 if max(sizes, default=0) <= SMALL_MATRIX else torch.get_num_threads()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads in torch's products, as long as the body runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def suited(model: nn.Module) -> AbstractContextManager[None]:
    """As many threads as suit `model`, as long as the body runs."""
    return threads(usual_threads(model))


def spread(function: Callable[[Sequence[Item]], Result], items: Sequence[Item]) -> list[Result]:
    """The results of `function` on consecutive groups of `items`, in order, one group for each thread.

    One group, in the calling thread, where there is one thread or item, or where somebody watches this
    thread's operations. Gradients are not recorded.
    """
    threads = torch.get_num_threads()
    workers = min(threads, WORKERS, len(items))
    if workers < 2 or is_in_torch_dispatch_mode():
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
    """Workers that share torch's `threads`; a forked process has none of its parent's and makes its own."""
    pool = ThreadPoolExecutor(workers, "attend", initializer=_settle, initargs=(threads // workers,))
    ready = threading.Barrier(workers + 1)
    for _ in range(workers):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(threads)  # what the workers set is also what threads yet to come would start with
    return pool


def _settle(threads: int) -> None:
    torch.get_num_threads()  # torch settles a new thread when first asked, and would undo what was set before
    torch.set_num_threads(threads)
