"""Figures drawn with matplotlib, without a screen and without its global state."""

import io
from pathlib import Path
from typing import Any

from polyformer.core.files import Write, atomic_write
from polyformer.core.imports import needs_extra


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib `Figure`, in inches; raises `InputError` if matplotlib is not installed."""
    with needs_extra("plot", "plot: drawing needs matplotlib, which is not installed"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def figure_svg(figure: Any) -> str:
    """Return the figure as SVG with text as text, identical for the same matplotlib version."""
    import matplotlib

    same: Any = {"svg.hashsalt": "polyformer", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = io.StringIO()
    with matplotlib.rc_context(same):
        figure.savefig(text, format="svg", metadata=nothing)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def save_figure(figure: Any, path: Path, write: Write = atomic_write) -> None:
    """Save the figure with `write`; the suffix of `path` gives the format (PNG without a suffix)."""
    ending = path.suffix.lstrip(".") or "png"
    write(path, lambda file: figure.savefig(file, format=ending, dpi=120))
