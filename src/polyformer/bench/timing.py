"""Fair timing: all candidates in turn in one process, so that a drifting machine disturbs each alike."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def in_turn(
    candidates: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of every counted run of every candidate; each round runs all of them once."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + repeats):
        for name, candidate in candidates.items():
            taken = stopwatch(candidate)
            if turn >= warmup:
                seconds[name].append(taken)
    return seconds


def stopwatch(run: Callable[[], object]) -> float:
    """Seconds that `run` takes, the accelerator's queue included."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the accelerator, if there is one, has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(seconds: list[float]) -> float:
    """The middle one."""
    return statistics.median(seconds)
