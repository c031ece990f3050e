"""Plots of the metrics of a run."""

from pathlib import Path

from polyformer.core.errors import InputError
from polyformer.core.figures import new_figure, save_figure
from polyformer.training.metrics import Row, read_metrics


def plot_curves(run: str | Path, path: str | Path | None = None) -> Path:
    """Draw the metrics of `run` into `path` (default RUN/curves.png; the suffix selects the format).

    One panel for the training and validation loss, one for the learning rate, one for each other validation
    metric. Returns the path. Raises `InputError` without matplotlib, or if the run has no metrics.
    """
    rows = read_metrics(run)
    if not rows:
        raise InputError(f"curves: {Path(run) / 'metrics.jsonl'} has no rows yet")
    path = Path(path) if path is not None else Path(run) / "curves.png"
    panels = panel_names(rows)
    figure = new_figure(8, 2.6 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, names) in zip(axes, panels.items()):
        for name in names:
            steps, values = series(rows, name)
            axis.plot(steps, values, label=name, marker="o" if len(steps) < 20 else None, markersize=3)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(frameon=False)
    axes[-1].set_xlabel("step")
    save_figure(figure, path)
    return path


def panel_names(rows: list[Row]) -> dict[str, list[str]]:
    """Return the metrics to draw in each panel, by the title of the panel, for the columns of `rows`."""
    measured = dict.fromkeys(name for row in rows for name in row)
    panels = {"loss": [name for name in ("loss", "valid_loss") if name in measured]}
    panels["learning rate"] = [name for name in ("lr",) if name in measured]
    panels |= {
        name.removeprefix("valid_").replace("_", " "): [name]
        for name in measured
        if name.startswith("valid_") and name != "valid_loss"
    }
    return {title: names for title, names in panels.items() if names}


def series(rows: list[Row], name: str) -> tuple[list[float], list[float]]:
    """Return the steps at which `name` was measured, and its values."""
    points = [(row["step"] or 0, value) for row in rows if (value := row.get(name)) is not None]
    return [step for step, _ in points], [value for _, value in points]
