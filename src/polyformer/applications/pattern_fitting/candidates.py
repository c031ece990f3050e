"""The patterns that a head may get, and their cost in query-key pairs."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyformer.attention.patterns import BlockWindow, Full, Global, Pattern, Random, Strided, Window
from polyformer.attention.patterns.implied import restricted
from polyformer.core.sequence.context import Context

WINDOWS = 512, 128, 64, 32, 21, 16, 11, 8, 5, 4, 3, 2
"""Windows, as parts of the length: a 512th to a half."""

SINKS = 4
"""First tokens that trained models use as attention sinks."""

BLOCK = 64
"""Positions of a block of the patterns of blocks."""

ROWS = 128
"""Queries with a mask in memory."""


def candidates(length: int) -> list[Pattern]:
    """Return the default patterns for texts of `length` tokens, all keys included.

    Windows with and without first tokens, strides, windows of blocks with random blocks, and sinks with the
    nearest tokens only.
    """
    near = sorted({max(1, length // part) for part in WINDOWS})
    patterns: list[Pattern] = [Window(4) | Global(SINKS)]
    for width in near:
        patterns += [Window(width), Window(width) | Global(SINKS)]
    # The square root of the length is the cheapest stride; an eighth of it reads more keys.
    for stride in sorted({max(2, int(length**0.5) // part) for part in (1, 4)}):
        patterns += [Strided(stride), Window(2 * stride) | Strided(stride) | Global(SINKS)]
    if length >= 8 * BLOCK:
        patterns += [BlockWindow(BLOCK) | Random(number, BLOCK) | Global(SINKS) for number in (3, 8)]
    return [*dict.fromkeys(patterns), Full()]


def pair_masks(pattern: Pattern, context: Context, rows: Tensor) -> Tensor:
    """Return whether the queries `rows` [R] see each key of a text, with the context's limits: [R, Tk]."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    mask = restricted(pattern, context).mask(
        context, zero, zero, rows.view(-1, 1), torch.arange(context.kv_len)
    )
    return mask.reshape(len(rows), context.kv_len)


def pair_counts(patterns: Sequence[Pattern], context: Context) -> Tensor:
    """Return the exact number of query-key pairs of a head with each pattern, int64 [C]."""
    return torch.tensor([sum(_counts(pattern, context)) for pattern in patterns])


def _counts(pattern: Pattern, context: Context) -> Iterator[int]:
    for rows in torch.arange(context.q_len).split(ROWS):
        yield int(pair_masks(pattern, context, rows).sum())
