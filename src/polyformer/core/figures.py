"""Figures drawn with matplotlib, without a screen and without its global state."""

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


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure, whole or not at all; the ending of `path` says the format (PNG without one)."""
    ending = path.suffix.lstrip(".") or "png"
    atomic_write(path, lambda partial: figure.savefig(partial, format=ending, dpi=120))
