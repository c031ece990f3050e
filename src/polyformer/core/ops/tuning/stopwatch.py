"""Timing of calls, to choose the fastest."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from polyformer.core.ops.tuning.machine import last_cache

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
