"""Measurement of time and memory, for benchmarks, and figures of the results.

All candidates are timed in turn in one process, so that a drifting machine affects all alike. The operating
system counts the memory. Figures are drawn with matplotlib, without a screen and without its global state.
"""

import io
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from polyformer.core.files import Write, atomic_write
from polyformer.core.imports import needs_extra


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of every counted run of every candidate; each round runs all of them once."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + repeats):
        for name, candidate in candidates.items():
            taken = time_once(candidate)
            if turn >= warmup:
                seconds[name].append(taken)
    return seconds


def time_once(run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes, including the accelerator's queue."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait until the accelerator, if there is one, has finished its queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(seconds: list[float]) -> float:
    """Return the median."""
    return statistics.median(seconds)


MIB = 1 << 20


def reset_peak_memory() -> int:
    """Return the resident bytes; on Linux this also resets the high-water mark."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the largest number of bytes that were resident at the same time."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.exists():  # VmHWM is the mark that clear_refs resets
        most = next(
            int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
    return most * (1 if sys.platform == "darwin" else 1024)


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
