"""ListOps, nested lists to evaluate, made from a seed: `[MAX 2 9 [MIN 4 7 ] 0 ]` is 9.

Operators are MIN, MAX, MED (the median, cut to a whole number) and SM (the sum modulo 10); the leaves are
digits. Long Range Arena's rules (Tay et al. 2021, section 2.2; the operators of Nangia and Bowman 2018) but
for the shape: here an expression has exactly the depth asked for, and few arguments, so that depth and length
can be told apart. Every closing bracket is labelled with the value of what it closes.
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
    """Tokens, and for each the value of what it closes and how deep that is; -100 and 0 for the others."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.values: list[int] = []
        self.depths: list[int] = []

    def add(self, token: int, value: int = -100, depth: int = 0) -> None:
        """One more token."""
        self.ids.append(token)
        self.values.append(value)
        self.depths.append(depth)


@dataclasses.dataclass(frozen=True)
class ListOps:
    """Lists of 2 to `most` items by these `operators`, none right inside one of its own; where a list as deep
    as is asked for is there already, an item is one too with this `chance`."""

    operators: tuple[str, ...] = tuple(OPERATORS)
    most: int = 3
    chance: float = 0.2

    def expression(self, depth: int, draw: random.Random) -> Expression:
        """A list exactly `depth` deep."""
        result = Expression()
        self._put(result, depth, "", draw)
        return result

    def _put(self, into: Expression, depth: int, around: str, draw: random.Random) -> int:
        """Adds a list of this depth, 0 for a digit, to one of the operator `around`; returns its value."""
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
