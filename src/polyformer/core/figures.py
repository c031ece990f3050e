"""Figures drawn with matplotlib, without a screen and without its global state."""

import io
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib `Figure`, in inches; raises `InputError` where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "plot: drawing needs matplotlib, which is not installed; pip install 'polyformer[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def figure_svg(figure: Any) -> str:
    """The figure as SVG whose letters stay letters: the same text at every build of one matplotlib."""
    import matplotlib

    same: Any = {"svg.hashsalt": "polyformer", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = io.StringIO()
    with matplotlib.rc_context(same):
        figure.savefig(text, format="svg", metadata=nothing)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure, whole or not at all; the ending of `path` says the format (PNG without one)."""
    ending = path.suffix.lstrip(".") or "png"
    atomic_write(path, lambda partial: figure.savefig(partial, format=ending, dpi=120))
