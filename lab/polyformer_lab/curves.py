"""Curves over the seeds: at each x the mean of y, its standard error and the number of seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from polyformer_lab.comparison import standard_error


class Point(NamedTuple):
    """The mean of y at x over the seeds, its standard error (None for one seed), and the number of seeds."""

    x: float
    mean: float
    error: float | None
    seeds: int


Curve = Sequence[Point]


def mean_curves(points: Iterable[tuple[str, float, float]]) -> dict[str, Curve]:
    """Return curves by name from (name, x, y), of the means and errors at each x that are finite."""
    curves: dict[str, dict[float, list[float]]] = {}
    for name, x, y in points:
        curves.setdefault(name, {}).setdefault(x, []).append(y)
    return {
        name: [*filter(_is_finite, map(_point, *zip(*sorted(own.items()))))] for name, own in curves.items()
    }


def _point(x: float, values: Sequence[float]) -> Point:
    return Point(x, statistics.fmean(values), standard_error(values), len(values))


def _is_finite(point: Point) -> bool:
    return math.isfinite(point.mean) and math.isfinite(point.error or 0.0)


def validation_metric(rows: Iterable[Mapping[str, object]]) -> str | None:
    """Return the metric of validation to draw: the loss, else the first in a log; None without any."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(VALIDATION))
    return f"{VALIDATION}loss" if f"{VALIDATION}loss" in names else next(iter(names), None)


VALIDATION = "valid_"
"""What the names of the validation's metrics start with in the log of a run."""
