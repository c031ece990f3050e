"""What the figures of a row say, by a rule that was written down before any were measured.

A row is judged by the nats of one kind of question (`Row.asks`), seed by seed. The scale is the distance of
two rows' means over their seeds: *dense* is softmax attention to every token, the *control* the same where it
cannot know the answer: for mechanisms, patterns and depth `Window(8)`, which two layers take 16 tokens far;
for position schemes no positions; for memories segments read without one (dense has the same positions); of
an image the last pixels. A seed closes the share (control - nats) / (control - dense) of that distance.

- *as dense*: every seed closes at least 0.9;
- *as the control*: every seed closes at most 0.1;
- *better than dense*: every seed closes at least 1.1; *worse than the control*: every seed at most -0.1;
- *between*: anything else, seeds that disagree included.

Where dense is not half a nat better than the control (for pixels, a twentieth of a nat) there is no scale,
and no verdict.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from polyformer.bench.reproduce.members.listing import CONTROL, DENSE, Row

ALIKE = 0.1
LEAST = {"recall": 0.5, "back": 0.5, "pixel": 0.05}

Figures = Mapping[str, Mapping[str, Any]]
"""By row and seed: nats and right by kind of question, milliseconds."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A row with what was measured of it."""

    row: Row
    seeds: int
    member: str  # its expression with the sizes that it had
    right: dict[str, tuple[float, float]]  # by kind: the mean over seeds and half the range
    nats: dict[str, tuple[float, float]]
    closed: tuple[float, float] | None  # the share of the scale, least and most
    verdict: str
    milliseconds: float
    slope: float | None
    mebibytes: float | None


def references(row: Row) -> tuple[Row, Row]:
    """Dense and control of a row."""
    if row.table == "image":
        return Row("image", "mechanism", DENSE), Row("image", "pattern", "Window(2, 0)")
    if row.family == "memory":
        return Row(row.table, "position", "transformer_xl"), Row(row.table, "memory", "none")
    dense = Row(row.table, "mechanism", DENSE)
    if row.family == "position":
        return dense, Row(row.table, "position", "none")
    return dense, Row(row.table, "pattern", CONTROL)


def line(row: Row, member: str, figures: Figures, slope: float | None, mebibytes: float | None) -> Line:
    """The line of a row that has figures."""
    runs = list(figures[row.name].values())
    dense, control = (_nats(figures.get(other.name, {}), row.asks) for other in references(row))
    share, words = None, "no verdict: dense and the control are missing"
    if dense and control:
        scale = statistics.mean(control) - statistics.mean(dense)
        words = "no verdict: dense is as the control"
        if scale >= LEAST[row.asks]:
            every = [(statistics.mean(control) - nats) / scale for nats in _nats(figures[row.name], row.asks)]
            share, words = (min(every), max(every)), judged(every)
    return Line(
        row,
        len(runs),
        member,
        {kind: _spread([run["right"][kind] for run in runs]) for kind in runs[0]["right"]},
        {kind: _spread([run["nats"][kind] for run in runs]) for kind in runs[0]["nats"]},
        share,
        words,
        statistics.median(run["milliseconds"] for run in runs),
        slope,
        mebibytes,
    )


def judged(closed: Sequence[float]) -> str:
    """The verdict on the shares that the seeds close."""
    if min(closed) >= 1 + ALIKE:
        return "better than dense"
    if min(closed) >= 1 - ALIKE:
        return "as dense"
    if max(closed) <= -ALIKE:
        return "worse than the control"
    return "as the control" if max(closed) <= ALIKE else "between"


def _nats(runs: Mapping[str, Any], kind: str) -> list[float]:
    return [run["nats"][kind] for run in runs.values()]


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), (max(values) - min(values)) / 2
