"""The growth of the cost of attention with the length of the text, measured on this machine in seconds."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Causal
from polyformer.core.measuring import time_interleaved

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
        calls = {name: partial(attend, q, k, v, pattern=pattern) for name, pattern in patterns.items()}
        for name, seconds in time_interleaved(calls, repeats).items():
            times[name].append(1000 * min(seconds))
    scores = [[sum(min(i + 1, most) for i in range(n)) for n in lengths] for most in (max(lengths), WINDOW)]
    return [
        Growth(name, tuple(lengths), tuple(times[name]), tuple(own)) for name, own in zip(patterns, scores)
    ]
