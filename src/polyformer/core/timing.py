"""Fair timing: all candidates in turn in one process, so that a drifting machine affects all alike."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of every counted run of every candidate; each round runs all of them once."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + repeats):
        for name, candidate in candidates.items():
            taken = time_once(candidate)
            if turn >= warmup:
                seconds[name].append(taken)
    return seconds


def time_once(run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes, including the accelerator's queue."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait until the accelerator, if there is one, has finished its queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(seconds: list[float]) -> float:
    """Return the median."""
    return statistics.median(seconds)
