"""Few combinations that hold all pairs: where axes are independent, a fault shows with two values at most."""

import itertools
from collections.abc import Sequence
from typing import Any

import registered


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations, a value of each axis, so that any two values of two axes stand in one of them.

    Greedy and the same each time: of all combinations always the first that adds the most new pairs. One axis
    is returned as it is, and the suite of every night gets all combinations.
    """
    if len(axes) < 2 or registered.EVERYTHING:
        return list(itertools.product(*axes))
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {place: set(itertools.combinations(enumerate(place), 2)) for place in places}
    missing = set().union(*pairs.values())
    result = []
    while missing:
        best = max(places, key=lambda place: len(pairs[place] & missing))
        result.append(best)
        missing -= pairs[best]
    return [tuple(axis[i] for axis, i in zip(axes, place)) for place in result]
