"""Differences between the labels of an axis over equal seeds: standard errors and paired tests.

The difference of two labels is computed for each seed, since equal seeds share the order of the data and
often the initial weights. Two tests ask whether its mean is 0:

- Student's paired t test (Student 1908), by scipy; it assumes normally distributed differences;
- the exact sign-flip test (Fisher 1935, The Design of Experiments, section 21): the share of all 2^n choices
  of signs of the n differences with a mean at least as far from 0. Without a difference each sign is
  equally likely. The smallest possible value is 2 / 2^n.

Neither is corrected for the number of comparisons.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

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
