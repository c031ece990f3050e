"""Line plots, the only kind of plot of the benches."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from polyformer.core.figures import new_figure, save_figure
from polyformer.core.files import write_output

Points = Sequence[tuple[float, float]]


def line_plot(path: str | Path, lines: Mapping[str, Points], x: str, y: str, log: bool = False) -> None:
    """Draw named lines of (x, y) points into `path` (PNG or SVG, by its suffix); `log` makes both axes
    logarithmic.

    Raises `InputError` if matplotlib is not installed.
    """
    figure = new_figure(8, 5)
    axis = figure.subplots()
    for name, points in lines.items():
        axis.plot([a for a, _ in points], [b for _, b in points], label=name, marker="o" if log else None)
    if log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    save_figure(figure, Path(path), write_output)
