"""The growth of the cost of attention with the length of the text, measured on this machine in seconds."""

import dataclasses
import time
from collections.abc import Sequence

import torch

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Causal

LENGTHS = (256, 512, 1024, 2048, 4096)
WINDOW, HEADS, HEAD_SIZE = 128, 4, 64
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Growth:
    """The growth of one pattern, by length: milliseconds of a forward pass, and number of allowed scores."""

    name: str
    lengths: tuple[int, ...]
    milliseconds: tuple[float, ...]
    scores: tuple[int, ...]


def measure_growth(lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS) -> list[Growth]:
    """Measure causal attention to all tokens before, and to the last `WINDOW` of them: the fastest of
    `repeats` runs.

    float32, one text, `HEADS` heads of `HEAD_SIZE`. The two are measured in turn at every length.
    """
    patterns: dict[str, Pattern] = {"dense": Causal(), f"window of {WINDOW}": Window(WINDOW - 1, 0)}
    times: dict[str, list[float]] = {name: [] for name in patterns}
    for length in lengths:
        q, k, v = torch.randn(3, 1, HEADS, length, HEAD_SIZE, generator=torch.Generator().manual_seed(0))
        fastest = dict.fromkeys(patterns, float("inf"))
        for _ in range(
            1 + repeats
        ):  # the first run, which initializes what later runs reuse, is never the fastest
            for name, pattern in patterns.items():
                start = time.perf_counter()
                attend(q, k, v, pattern=pattern)
                fastest[name] = min(fastest[name], 1000 * (time.perf_counter() - start))
        for name in patterns:
            times[name].append(fastest[name])
    scores = {"dense": [n * (n + 1) // 2 for n in lengths]}
    scores[f"window of {WINDOW}"] = [sum(min(i + 1, WINDOW) for i in range(n)) for n in lengths]
    return [Growth(name, tuple(lengths), tuple(times[name]), tuple(scores[name])) for name in patterns]
