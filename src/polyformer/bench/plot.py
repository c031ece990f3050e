"""Lines in a picture, the one kind of plot that benches need."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write

Points = Sequence[tuple[float, float]]


def line_plot(path: str | Path, lines: Mapping[str, Points], x: str, y: str, log: bool = False) -> None:
    """Draw named lines of (x, y) points into `path` (PNG or SVG, by its ending); both axes logarithmic with `log`.

    Raises `InputError` where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "plot: matplotlib is not installed; pip install 'polyformer[plot]', or do without the plot"
        ) from error
    path = Path(path)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
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
    ending = path.suffix.lstrip(".") or "png"
    atomic_write(path, lambda partial: figure.savefig(partial, format=ending, dpi=120))
