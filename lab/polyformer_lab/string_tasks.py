"""Strings of digits for learning an algorithm, generated from a seed: copying, reversing, adding.

    copy      3 1 4        ->  3 1 4
    reverse   3 1 4        ->  4 1 3
    add       3 1 + 4 2    ->  7 3 0        digits from the last to the first: 13 + 24 = 37

Both end with `END`. Source lengths count digits, of both numbers in a sum. Kaiser and Sutskever 2016 (Neural
GPU), section 3; Dehghani et al. 2019, section 3.3, with the opposite order of digits where they specify none.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

PAD, START, END, PLUS, DIGIT = 0, 1, 2, 3, 4
"""Token ids; digit n is DIGIT + n."""

VOCABULARY = DIGIT + 10


def copies(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return source and target [rows, length + 1]."""
    source = _ended(_digits(rows, length, generator))
    return source, source


def reversals(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return source and target [rows, length + 1]."""
    digits = _digits(rows, length, generator)
    return _ended(digits), _ended(digits.flip(1))


def sums(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sums of numbers of n = `length` // 2 digits: source [rows, 2 n + 2], target [rows, n + 2]."""
    a, b = (_digits(rows, max(1, length // 2), generator) for _ in range(2))
    carry, digits = a.new_zeros(rows), []
    for column in (a + b - 2 * DIGIT).unbind(1):
        total = column + carry
        digits.append(total % 10)
        carry = total // 10
    plus = a.new_full((rows, 1), PLUS)
    return _ended(torch.cat([a, plus, b], 1)), _ended(torch.stack([*digits, carry], 1) + DIGIT)


Strings = Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]

STRINGS: Mapping[str, Strings] = {"copy": copies, "reverse": reversals, "add": sums}
"""By task: a function from rows, length of the source and generator to ids of sources and targets."""


def _digits(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(DIGIT, DIGIT + 10, (rows, length), generator=generator)


def _ended(ids: Tensor) -> Tensor:
    return torch.cat([ids, ids.new_full((len(ids), 1), END)], 1)
