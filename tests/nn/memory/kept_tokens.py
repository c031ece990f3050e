"""The definition of sinks: each step is recomputed from the tokens that it keeps."""

from collections.abc import Callable

import torch
from torch import Tensor

VOCAB, FIRST, LENGTH = 13, 2, 5


def text(rows: int = 2, length: int = 23) -> Tensor:
    """Token ids, no special tokens."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def same(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def recomputed(last: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """The outputs [B, T, V] of `last`, a dense model's last output for token ids, from the kept tokens."""
    steps = []
    for i in range(ids.shape[1]):
        kept = [j for j in range(i + 1) if j < FIRST or j > i - LENGTH]
        steps.append(last(ids[:, kept]))
    return torch.stack(steps, 1)
