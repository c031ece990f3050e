"""Line plots: of the benches, and curves of experiments with a band over the seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.files import write_output
from polyformer.core.measuring import new_figure, save_figure
from polyformer_lab.curves import Curve

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
