"""How long calls take, for choosing the fastest."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

K = TypeVar("K")


def least_seconds(
    calls: Mapping[K, Callable[[], object]],
    rounds: int,
    decided: Callable[[Mapping[K, float]], bool] = lambda least: False,
    before: Callable[[], object] | None = None,
) -> dict[K, float]:
    """The shortest of `rounds` runs of each call, all in turn, after one that is not counted.

    The shortest: what else runs on the machine can only lengthen one. The first finds new memory, and oneDNN
    compiles its kernels. No more rounds are run once what was measured so far is `decided`. before: runs
    before each call, untimed, such as what empties the caches.
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
