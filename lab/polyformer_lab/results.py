"""The results of a study: its rows as a table, as a curve, and the verdict of each claim."""

import csv
import dataclasses
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, unknown
from polyformer.core.files import atomic_write
from polyformer_lab.cells import MEASURES, Cell, Row, function_of
from polyformer_lab.comparison import Curve, mean_curves, standard_error
from polyformer_lab.expression import Array, evaluate
from polyformer_lab.study import Claim, Study, same_label

REPRODUCED, DIFFERS, UNSHOWN, UNDECIDED = OUTCOMES = (
    "reproduced",
    "not reproduced",
    "not at this scale",
    "undecided",
)
"""The outcomes of published claims: `UNSHOWN` if the runs are too small to decide, `UNDECIDED` if their seeds
differ.
"""

OWN_WORDS = {REPRODUCED: "supported", DIFFERS: "not supported"}
"""The outcomes of a user's hypothesis, which has nothing to reproduce, where their words differ."""


def outcomes(claim: Claim) -> list[str]:
    """Return the possible outcomes of a claim in their words."""
    return [outcome_in_words(outcome, claim) for outcome in OUTCOMES]


def outcome_in_words(outcome: str, claim: Claim) -> str:
    """Return an entry of `OUTCOMES` in the words for a published claim or for the user's hypothesis."""
    return outcome if claim.is_published else OWN_WORDS.get(outcome, outcome)


SEED = "seed"

LARGE = 1e6
"""The smallest float of which a table shows only four digits."""

MEANINGLESS = "sizes without a meaning: "
"""The beginning of a verdict on a quick run."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verdict. `outcome`: one of `outcomes`. `text`: the printed sentence, with the figures."""

    outcome: str
    text: str


@dataclasses.dataclass(frozen=True)
class Judged:
    """The outcome of a rule, the conditions that failed in words, and the defined values."""

    outcome: str
    reasons: str
    defined: dict[str, Any]


class Results:
    """All rows of a study, each with its labels, its seed if there are seeds, and its metrics."""

    def __init__(self, study: Study, rows: Sequence[Row]):
        self.study, self.rows = study, rows
        self.absent: dict[str, str] = {}
        self.index = (*study.axes, *function_of(study.measure["kind"], MEASURES).index)
        self.seeds = [*dict.fromkeys(row.get(SEED) for row in rows)]
        labels = {axis: [*dict.fromkeys(str(row.get(axis)) for row in rows)] for axis in self.index}
        self.labels = {axis: [label for label in own if label != "None"] for axis, own in labels.items()}
        self.metrics = [
            *dict.fromkeys(name for row in rows for name in row if name not in (*self.index, SEED))
        ]
        self.values = {(*self._key(row), row.get(SEED)): row for row in rows}

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row[axis]) for axis in self.index if row.get(axis) is not None)

    def lookup(self, metric: str, labels: tuple[Any, ...]) -> Array:
        """Return a metric by seed for the cell with these labels, or [labels, seeds] for several cells.

        Raises:
            InputError: there is no such metric or label.
            KeyError: the cell was not measured.
        """
        if metric not in self.metrics:
            raise unknown("metric or name", metric, self.metrics)
        places = [place for place, label in enumerate(labels) if isinstance(label, slice)]
        if not places:
            own = self.known_labels(labels)
            try:
                return np.array([self.values[*own, seed][metric] for seed in self.seeds], dtype=float)
            except KeyError:
                raise KeyError(f"{metric}[{', '.join(own)}]") from None
        if len(places) > 1:
            raise InputError(f"{metric}: expected at most one ':' among its labels")
        axis = self.index[places[0]]
        several = [label for label in self.labels[axis] if within(label, labels[places[0]])]
        if all(isinstance(number(label), int | float) for label in several):
            several.sort(key=float)  # "first" and "growth" follow the numbers, not the order of the cells
        chosen = [(*labels[: places[0]], label, *labels[places[0] + 1 :]) for label in several]
        whole = [(own, self.known_labels(own)) for own in chosen]
        present = [own for own, key in whole if all((*key, seed) in self.values for seed in self.seeds)]
        if not present:
            raise KeyError(f"{metric}[{', '.join(map(str, labels))}]")
        return np.stack([self.lookup(metric, own) for own in present])

    def known_labels(self, labels: tuple[Any, ...]) -> tuple[str, ...]:
        """Return the labels of an expression as the rows have them, "3e-3" for the number 0.003."""
        axes = [*(self.labels[axis] for axis in self.index), *[[]] * len(labels)]
        return tuple(same_label(label, axis) or str(label) for label, axis in zip(labels, axes))

    def verdict(self, claim: Claim) -> Verdict | None:
        """Return the verdict on a claim; None, with a note in `absent`, without the cells it requires.

        It is `UNDECIDED` if the rule has another outcome for the figures of some seed: a difference smaller
        than the spread of the seeds decides nothing, whatever their mean is.
        """
        try:
            whole = self._judged(claim)
        except KeyError as error:
            self.absent[claim.claim] = str(error.args[0])
            return None
        outcome, reasons = whole.outcome, whole.reasons
        by_seed = {seed: self._of_seed(seed)._judged(claim).outcome for seed in self.seeds}
        if outcome != UNSHOWN and {REPRODUCED, DIFFERS} <= {*by_seed.values()}:
            words = {seed: outcome_in_words(result, claim) for seed, result in by_seed.items()}
            seeds = (f"{result} with seed {seed}" for seed, result in words.items())
            outcome, reasons = UNDECIDED, f", because the seeds differ: {', '.join(seeds)}"
        figures = "; ".join(f"{name} {said(value)}" for name, value in whole.defined.items())
        outcome = outcome_in_words(outcome, claim)
        return Verdict(outcome, f"{claim.claim}: {outcome}{reasons} ({figures})")

    def _of_seed(self, seed: Any) -> "Results":
        """Return the results of a single seed."""
        return Results(self.study, [row for row in self.rows if row.get(SEED) == seed])

    def _judged(self, claim: Claim) -> "Judged":
        """Return the outcome of a rule for all figures; raises `KeyError` for a cell that is missing."""
        defined: dict[str, Any] = {}
        for name, text in claim.define.items():
            defined[name] = evaluate(str(text), self.lookup, defined)
        shown, holds = (
            [(text, self._by_seed(evaluate(text, self.lookup, defined))) for text in texts]
            for texts in (claim.shown, claim.holds)
        )
        decides = np.all([values for _, values in shown] or [True], axis=0)
        fulfilled = np.all([values for _, values in holds], axis=0)
        outcome = REPRODUCED
        if np.any(~decides):
            outcome = UNSHOWN
        if np.any(decides & ~fulfilled):
            outcome = DIFFERS
        failed = [text for text, values in (shown if outcome == UNSHOWN else holds) if not np.all(values)]
        reasons = "" if outcome == REPRODUCED else f", not fulfilled: {'; '.join(failed)}"
        return Judged(outcome, reasons, defined)

    def _by_seed(self, value: Any) -> Array:
        """Return the truth of a condition for each seed; with several labels it must hold for all of them."""
        array = np.asarray(value, dtype=bool)
        while array.ndim > 1:
            array = array.all(0)
        count = len(self.seeds)
        return np.broadcast_to(array if array.size in (1, count) else array.all(), (count,))

    @property
    def columns(self) -> list[str]:
        """Return the metrics of the table: those that the study names, else all."""
        return [name for name in self.study.metrics or self.metrics if name in self.metrics]

    def table(self) -> list[list[str]]:
        """Return the header and a line for each combination of labels, with `cell` for each metric."""
        metrics = self.columns
        head = [*self.index, *metrics]
        lines: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            lines.setdefault(tuple(str(row.get(axis, "")) for axis in self.index), []).append(row)
        body = [
            [*key, *(cell([row.get(name) for row in own]) for name in metrics)] for key, own in lines.items()
        ]
        return [head, *body]

    def curves(self, x: str, y: str) -> dict[str, Curve]:
        """Return the metric y over the axis or metric x, by the other labels."""
        present = [row for row in self.rows if row.get(x) is not None and row.get(y) is not None]
        try:
            return mean_curves((self._name(row, x) or y, float(row[x]), float(row[y])) for row in present)
        except ValueError as error:
            raise InputError(f"plot: expected numbers in {x} and {y} ({error})") from error

    def _name(self, row: Row, without: str) -> str:
        """Return the labels of a row, except for one axis."""
        return ", ".join(
            str(row[axis]) for axis in self.index if axis != without and row.get(axis) is not None
        )


def results_of(study: Study, cells: Iterable[Cell]) -> Results:
    """Return the rows of the finished cells, in their order."""
    rows = []
    for each in cells:
        own = dict(zip(study.axes, each.labels)) | ({} if each.seed is None else {SEED: each.seed})
        rows += [{**own, **row} for row in each.rows() or ()]
    return Results(study, rows)


def read_csv(study: Study, file: Path) -> Results:
    """Return results that `write_csv` wrote; labels of the grid stay as they are written."""
    with file.open(encoding="utf-8", newline="") as text:
        rows = [
            {name: value if name in study.axes else number(value) for name, value in row.items() if value}
            for row in csv.DictReader(text)
        ]
    return Results(study, rows)


def write_csv(results: Results, file: Path) -> None:
    """Write all rows."""
    text = io.StringIO()
    seeds = [] if results.seeds in ([], [None]) else [SEED]
    writer = csv.DictWriter(text, [*results.index, *seeds, *results.metrics], lineterminator="\n")
    writer.writeheader()
    writer.writerows(results.rows)
    atomic_write(file, text.getvalue().encode())


def write_table(head: Sequence[str], lines: Sequence[Sequence[str]], file: Path) -> None:
    """Write a table of texts as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *lines])
    atomic_write(file, text.getvalue().encode())


def number(text: str) -> float | int | str:
    """Return the number that a cell of a table holds, or its text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def cell(values: Sequence[Any]) -> str:
    """Return the values of all seeds as one cell: the common value, or mean, standard error and range."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    if len({*map(str, present)}) == 1:
        return short(present[0])
    if all(isinstance(value, int | float) for value in present):
        mean, error = statistics.fmean(present), standard_error(present)
        return f"{mean:.4g} ± {error:.2g} ({min(present):.4g} to {max(present):.4g})"
    return ", ".join(map(short, present))


def short(value: Any) -> str:
    """Return a value with four digits; a float that is a small integer with all of its digits."""
    whole = not isinstance(value, float) or (value.is_integer() and abs(value) < LARGE)
    return str(value) if whole else f"{value:.4g}"


def said(value: Any) -> str:
    """Return a defined value in words: each label of several, mean and range of several seeds."""
    array = np.asarray(value, dtype=float)
    if array.ndim > 1:
        return ", ".join(f"{row.mean():.4g}" for row in array)
    if array.size == 1:
        return f"{float(array.reshape(())):.4g}"
    return f"{array.mean():.4g} ({array.min():.4g} to {array.max():.4g})"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in columns."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]


def within(label: str, bounds: slice) -> bool:
    """Return whether a label is between the numbers of a slice, both included."""
    if bounds.start is None and bounds.stop is None:
        return True
    try:
        value = float(label)
    except ValueError:
        return False
    return (bounds.start is None or value >= bounds.start) and (bounds.stop is None or value <= bounds.stop)


def by_name(results: Results, claims: Mapping[str, Claim]) -> dict[str, Verdict]:
    """Return the verdict of each claim that the results decide."""
    verdicts = {name: results.verdict(claim) for name, claim in claims.items()}
    return {name: verdict for name, verdict in verdicts.items() if verdict is not None}
