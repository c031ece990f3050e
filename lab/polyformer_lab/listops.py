"""ListOps, nested lists to evaluate, generated from a seed: `[MAX 2 9 [MIN 4 7 ] 0 ]` is 9.

Operators are MIN, MAX, MED (the median, truncated to an integer) and SM (the sum modulo 10); the leaves are
digits. The rules are Long Range Arena's (Tay et al. 2021, section 2.2; the operators of Nangia and Bowman
2018) except for the shape: an expression has exactly the requested depth, and few arguments, so that the
effects of depth and length can be separated. Every closing bracket is labelled with the value of its list.
"""

import dataclasses
import random
import statistics
from collections.abc import Callable, Mapping

PAD, CLOSE, DIGIT, OPERATOR = 0, 1, 2, 12
"""Token ids; digit n is DIGIT + n, operator n of `OPERATORS` is OPERATOR + n."""

OPERATORS: Mapping[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}

VOCABULARY = OPERATOR + len(OPERATORS)


class Expression:
    """Tokens, with the value and depth of the list that each closes; -100 and 0 for other tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.values: list[int] = []
        self.depths: list[int] = []

    def add(self, token: int, value: int = -100, depth: int = 0) -> None:
        """Add a token."""
        self.ids.append(token)
        self.values.append(value)
        self.depths.append(depth)


@dataclasses.dataclass(frozen=True)
class ListOps:
    """A generator of lists of 2 to `most` items by these `operators`.

    A list never directly contains a list of the same operator. One item has the full depth; every other item
    is also a list with the probability `chance`.
    """

    operators: tuple[str, ...] = tuple(OPERATORS)
    most: int = 3
    chance: float = 0.2

    def expression(self, depth: int, draw: random.Random) -> Expression:
        """Return a list of exactly this depth."""
        result = Expression()
        self._put(result, depth, "", draw)
        return result

    def _put(self, into: Expression, depth: int, around: str, draw: random.Random) -> int:
        """Add a list of this depth, or a digit for 0, within operator `around`; return its value."""
        if not depth:
            value = draw.randrange(10)
            into.add(DIGIT + value)
            return value
        name = draw.choice([name for name in self.operators if name != around])
        count = draw.randint(2, self.most)
        deepest = draw.randrange(count)
        into.add(OPERATOR + list(OPERATORS).index(name))
        values = []
        for item in range(count):
            inner = draw.randrange(1, depth) if depth > 1 and draw.random() < self.chance else 0
            values.append(self._put(into, depth - 1 if item == deepest else inner, name, draw))
        value = OPERATORS[name](values)
        into.add(CLOSE, value, depth)
        return value
