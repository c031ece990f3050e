"""Differences between the labels of an axis over equal seeds, curves over the seeds, and their plots.

The difference of two labels is computed for each seed, since equal seeds share the order of the data and
often the initial weights. Two tests ask whether its mean is 0:

- Student's paired t test (Student 1908), by scipy; it assumes normally distributed differences;
- the exact sign-flip test (Fisher 1935, The Design of Experiments, section 21): the share of all 2^n choices
  of signs of the n differences with a mean at least as far from 0. Without a difference each sign is
  equally likely. The smallest possible value is 2 / 2^n.

Neither is corrected for the number of comparisons.

A curve has at each x the mean of y, its standard error and the number of seeds.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polyformer.core.files import write_output
from polyformer.core.measuring import new_figure, save_figure
from polyformer_lab.costs import COSTS
from polyformer_lab.expression import Array

if TYPE_CHECKING:
    from polyformer_lab.results import Results

LEVEL = 0.05
"""The largest p value of the t test for which a difference is decided."""

MOST = 16
"""The most seeds of the sign-flip test, which goes through 2^16 choices of signs."""

LOWER, HIGHER, EQUAL, UNDECIDED = "lower", "higher", "equal", "undecided"

COUNTS = {1: "one seed", 2: "two seeds", 3: "three seeds", 4: "four seeds", 5: "five seeds"}

HEAD = ("axis", "label", "against", "at", "metric", "difference", "t", "p of t", "p of signs", "outcome")


@dataclasses.dataclass(frozen=True)
class Difference:
    """A metric of a label minus the metric of the first label of its axis, by seed. at: the other labels."""

    axis: str
    label: str
    against: str
    at: str
    metric: str
    values: Array

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return float(self.values.mean())

    @property
    def t(self) -> tuple[float, float] | None:
        """Student's t and its two-sided p value; None where all differences are equal."""
        from scipy.stats import t as students

        error = standard_error(self.values)
        if error is None or np.ptp(self.values) == 0:
            return None
        t = self.mean / error
        return t, float(2 * students.sf(abs(t), self.values.size - 1))

    @property
    def outcome(self) -> str:
        """Return whether the metric is lower or higher; undecided within the spread of the seeds.

        A difference is decided if it has one sign with all seeds, and the t test gives less than `LEVEL`.
        """
        if not np.any(self.values):
            return EQUAL
        one_sign = np.all(self.values > 0) or np.all(self.values < 0)
        if not one_sign or self.values.size < 2 or (self.t is not None and self.t[1] >= LEVEL):
            return UNDECIDED
        return LOWER if self.mean < 0 else HIGHER

    def line(self) -> list[str]:
        """Return the cells of a table with the columns of `HEAD`."""
        error, t, signs = standard_error(self.values), self.t, sign_flip_p(self.values)
        numbers = [
            f"{self.mean:+.4g}" + ("" if error is None else f" ± {error:.2g}"),
            *(("-", "-") if t is None else (f"{t[0]:.3g}", f"{t[1]:.2g}")),
            "-" if signs is None else f"{signs:.2g}",
        ]
        return [self.axis, self.label, self.against, self.at or "-", self.metric, *numbers, self.outcome]


def standard_error(values: Sequence[float] | Array) -> float | None:
    """Return the standard error of the mean, s / sqrt(n) with n - 1 in s; None for a single value."""
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def sign_flip_p(differences: Array) -> float | None:
    """Return the exact two-sided p value of the sign-flip test; None above `MOST` differences."""
    if not 0 < differences.size <= MOST:
        return None
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=differences.size)))
    sums, own = np.abs(signs @ differences), abs(differences.sum())
    return float(np.mean(sums >= own * (1 - 1e-9)))  # equal sums may differ in the last bit


def smallest_p(seeds: int) -> str:
    """Return what the sign-flip test can show with a number of seeds, in words."""
    least, named = 2 / 2**seeds, COUNTS.get(seeds, f"{seeds} seeds")
    if least < LEVEL:
        return f"the smallest p of a sign-flip test with {named} is {least:.2g}"
    return (
        f"{named} cannot reach {LEVEL} with a sign-flip test: its smallest p is {least:.2g}; "
        "six seeds reach 0.031"
    )


def comparison_note(seeds: int) -> str:
    """Return how a table of differences is to be read, with what its number of seeds can show."""
    return (
        "Differences of the same seeds, mean ± standard error; paired t test (Student 1908) and exact "
        f"sign-flip test (Fisher 1935), both two-sided. Undecided: the sign differs between seeds, or the t "
        f"test gives {LEVEL} or more. The p values are not corrected for the number of comparisons; "
        f"{smallest_p(seeds)}."
    )


def differences(results: "Results") -> list[Difference]:
    """Return each label of an axis compared with the first, at equal other labels and equal seeds.

    Only metrics that vary with the seed are compared, and only the rows that all seeds have; no costs, since
    the order of the runs decides more on the memory of a process than the seed.
    """
    if len(results.seeds) < 2:
        return []
    return [
        difference
        for place, axis in enumerate(results.study.axes)
        for label in results.labels[axis][1:]
        for difference in _compared(results, place, axis, label)
    ]


def _compared(results: "Results", place: int, axis: str, label: str) -> Iterator[Difference]:
    first = results.labels[axis][0]
    for own in dict.fromkeys(key[:-1] for key in results.values):
        if own[place] != label:
            continue
        other = (*own[:place], first, *own[place + 1 :])
        at = ", ".join((*own[:place], *own[place + 1 :]))
        for metric in (name for name in results.columns if name not in COSTS):
            values, base = (_by_seed(results, key, metric) for key in (own, other))
            if values is not None and base is not None and (np.ptp(values) > 0 or np.ptp(base) > 0):
                yield Difference(axis, label, first, at, metric, values - base)


def _by_seed(results: "Results", key: tuple[str, ...], metric: str) -> Array | None:
    """Return a metric of a row for each seed; None unless all are finite numbers."""
    values = [results.values.get((*key, seed), {}).get(metric) for seed in results.seeds]
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return np.array(numbers, dtype=float) if len(numbers) == len(values) else None


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


Points = Sequence[tuple[float, float]]

FEW = 20
"""The number of points from which a curve has no marks."""


def line_plot(path: str | Path, lines: Mapping[str, Points], x: str, y: str, log: bool = False) -> None:
    """Draw named lines of (x, y) points into `path` (PNG or SVG, by its suffix); `log` makes both axes
    logarithmic.

    Raises `InputError` if matplotlib is not installed.
    """
    figure = new_figure(8, 5)
    axis = figure.subplots()
    for name, points in lines.items():
        axis.plot([a for a, _ in points], [b for _, b in points], label=name, marker="o" if log else None)
    _finish(figure, axis, Path(path), (x, y), log)


def band_plot(path: str | Path, curves: Mapping[str, Curve], x: str, y: str, log: bool = False) -> None:
    """Draw named curves into `path` as `line_plot` does lines, each with its band."""
    figure = new_figure(8, 5)
    axis = figure.subplots()
    for name, curve in curves.items():
        draw_band(axis, name, curve)
    axis.set_title(caption(curves), fontsize="small")
    _finish(figure, axis, Path(path), (x, y), log)


def draw_band(axis: Any, name: str, curve: Curve) -> None:
    """Draw the means of a curve, and its band of the mean plus and minus the error.

    A curve of few points has a mark on each, and a bar for the error: a band of one point would not be seen.
    """
    places, means = [point.x for point in curve], [point.mean for point in curve]
    errors = [point.error or 0.0 for point in curve]
    few = len(curve) < FEW
    (line,) = axis.plot(places, means, label=name, marker="o" if few else None, markersize=4)
    if few and any(errors):
        axis.errorbar(places, means, errors, fmt="none", ecolor=line.get_color(), capsize=3, alpha=0.7)
    low, high = ([a + sign * b for a, b in zip(means, errors)] for sign in (-1, 1))
    axis.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def caption(curves: Mapping[str, Curve]) -> str:
    """Return what the lines and the bands of curves are."""
    counts = sorted({point.seeds for curve in curves.values() for point in curve})
    if counts in ([], [1]):
        return "one seed, without a band"
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean over {seeds} seeds; band: mean ± one standard error of the mean over the seeds"


def _finish(figure: Any, axis: Any, path: Path, names: tuple[str, str], log: bool) -> None:
    if log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_xlabel(names[0])
    axis.set_ylabel(names[1])
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    save_figure(figure, path, write_output)
