"""Fair timing: all candidates in turn in one process, so that a drifting machine affects all alike."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def in_turn(
    candidates: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of every counted run of every candidate; each round runs all of them once."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + repeats):
        for name, candidate in candidates.items():
            taken = stopwatch(candidate)
            if turn >= warmup:
                seconds[name].append(taken)
    return seconds


def stopwatch(run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes, including the accelerator's queue."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Wait until the accelerator, if there is one, has finished its queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(seconds: list[float]) -> float:
    """Return the median."""
    return statistics.median(seconds)
