"""The metrics of a run: files, plots and progress, and the trackers of experiments.

OUT/metrics.jsonl is the record of the run; OUT/metrics.csv has a row per reported step. The progress is a bar
on a terminal, otherwise a line per report.

Trackers are TensorBoard, Weights & Biases, MLflow and trackio. accelerate's trackers write to these services;
here is what each needs to begin and to continue. A run that is resumed continues the same run of the service;
its name is in OUT/tracking.json. A service that fails ends no training, it is left out with a warning.

    tensorboard    events in OUT/tensorboard; steps that run again replace the earlier ones
    wandb          files in OUT/wandb; the project is WANDB_PROJECT, or the folder that holds OUT
    mlflow         the server or folder that MLFLOW_TRACKING_URI names; the experiment is that folder's name
    trackio        its own folder of the user; the project is that folder's name
"""

import csv
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from polyformer.core.errors import InputError, caution
from polyformer.core.files import atomic_write, open_file, read_json, reading, writing
from polyformer.core.measuring import new_figure, save_figure
from polyformer.core.parsing import parse_json
from polyformer.training.config import ReportingConfig, TrackerName

NAMES = "tracking.json"
"""The file in a run's folder with the names of its runs in the services."""


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise `InputError` for a tracker that is named twice or not installed."""
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"tracking: {name} is named twice")
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"tracking: {name} is not installed; pip install {name}, or leave it out: metrics.csv and "
                "metrics.jsonl are written anyway"
            )


class Trackers:
    """The trackers of one run, on its main process.

    out: the folder of the run. after: the step after which it continues, 0 for a new run. settings: of the
    run, by dotted name.
    """

    def __init__(
        self, out: Path, names: Sequence[TrackerName], after: int = 0, settings: dict[str, Any] | None = None
    ):
        self.out, self.after = out, after
        known = read_json(out / NAMES, dict) if after and (out / NAMES).exists() else {}
        self.known: dict[str, str] = {name: str(value) for name, value in known.items()}
        self.active: dict[str, Any] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._start(name, settings or {}))
        if self.known:
            atomic_write(out / NAMES, json.dumps(self.known, indent=1).encode())

    def log(self, values: dict[str, float], step: int) -> None:
        """Add the metrics of a step."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(values, step=step))

    def close(self) -> None:
        """End the runs of all services."""
        for name, tracker in list(self.active.items()):
            self._attempt(name, tracker.finish)
        self.active = {}

    def _attempt(self, name: str, work: Callable[[], object]) -> None:
        """Do the work of a tracker; leave the tracker out if it fails: training continues without it."""
        try:
            work()
        except Exception as error:
            self.active.pop(name, None)
            caution(f"tracking: {name} is left out from here, as it failed: {type(error).__name__}: {error}")

    def _start(self, name: str, settings: dict[str, Any]) -> None:
        tracker = STARTS[name](self)
        tracker.main_process_only = False  # this is the main process
        tracker.start()
        self.active[name] = tracker
        if name == "wandb":
            self.known[name] = tracker.tracker.id
        elif name == "mlflow":
            self.known[name] = tracker.tracker.info.run_id
        # For TensorBoard accelerate would write to a second folder. A resume in trackio replaces settings.
        if name == "trackio" or (not self.after and name != "tensorboard"):
            tracker.store_init_configuration(settings)

    @property
    def project(self) -> str:
        """The name of the runs' common project: of the folder that holds the run."""
        return self.out.absolute().parent.name or "polyformer"


def _tensorboard(run: Trackers) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker("tensorboard", run.out, purge_step=run.after + 1)


def _wandb(run: Trackers) -> Any:
    from accelerate.tracking import WandBTracker

    project = os.environ.get("WANDB_PROJECT", run.project)
    goes_on = {"id": run.known["wandb"], "resume": "allow"} if "wandb" in run.known else {}
    return WandBTracker(project, dir=str(run.out), name=run.out.name, **goes_on)


def _mlflow(run: Trackers) -> Any:
    from accelerate.tracking import MLflowTracker

    return MLflowTracker(run.project, run_id=run.known.get("mlflow"), run_name=run.out.name)


def _trackio(run: Trackers) -> Any:
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(run.project, name=run.out.name, resume="allow")


STARTS: dict[str, Callable[[Trackers], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""Functions that make accelerate's tracker of a run."""


if TYPE_CHECKING:
    from rich.progress import TaskID


LINES, TABLE = "metrics.jsonl", "metrics.csv"

PER_SECOND = "_per_s"
"""The end of the name of the speed of training; before it stands what the task counts, such as tokens."""

Row = dict[str, float | None]


def read_metrics(run: str | Path) -> list[Row]:
    """Return the rows of a run's metrics.jsonl, in order, without a last line truncated by a kill."""
    path = Path(run) / LINES
    with reading(path), open_file(path) as file:
        lines = file.read().splitlines(keepends=True)
    rows = [
        parse_json(line, f"{path}, line {number}", dict)
        for number, line in enumerate(lines, 1)
        if line.endswith(b"\n")
    ]
    for number, row in enumerate(rows, 1):
        if type(row.get("step")) is not int or not all(_is_metric(value) for value in row.values()):
            raise InputError(
                f"{path}, line {number}: expected a row of numbers with its step; remove the line"
            )
    return rows


def _is_metric(value: object) -> bool:
    """Return whether a value is a number, or None for one that is not finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def check_reporting(config: ReportingConfig, out: Path) -> None:
    """Raise `InputError`, before anything is written, if the configured reports are impossible."""
    if config.curves:
        new_figure(1, 1)
    check_trackers(config.tracking)
    if (out / LINES).exists():
        read_metrics(out)


class MetricsLog:
    """A log that appends rows to both files; the JSON lines are the record, the table is derived from them.

    On a resume after step `after`, the rows of later steps are dropped, because these steps run again.
    The rows also go to the `trackers`.
    """

    def __init__(self, out: Path, after: int, trackers: Trackers | None = None) -> None:
        self.lines, self.table = out / LINES, out / TABLE
        earlier = read_metrics(out) if after and self.lines.exists() else []
        self._rows = [row for row in earlier if (row["step"] or 0) <= after]
        self._columns: list[str] = []
        self._rewrite()
        self._trackers = trackers

    @property
    def seconds(self) -> float:
        """Return the duration of the run so far, according to the rows."""
        return max((row.get("seconds") or 0.0 for row in self._rows), default=0.0)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a row. Values that are not finite are left empty: neither format can represent them."""
        row: Row = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._rows.append(row)
        if set(row) <= set(self._columns):
            _append(self.lines, json.dumps(row) + "\n")
            _append(self.table, _table_rows(self._columns, [row]))
        else:
            self._rewrite()
        if self._trackers is not None:
            self._trackers.log(values, step)

    def sync(self) -> None:
        """Flush all rows to the disk, before a checkpoint that relies on them."""
        for path in (self.lines, self.table):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the trackers, if any."""
        if self._trackers is not None:
            self._trackers.close()

    def _rewrite(self) -> None:
        """Write both files again: at the start, and when a column appears that the table does not have."""
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        atomic_write(self.lines, "".join(json.dumps(row) + "\n" for row in self._rows).encode())
        header = (
            _table_rows(self._columns, [dict(zip(self._columns, self._columns))]) if self._columns else ""
        )
        atomic_write(self.table, (header + _table_rows(self._columns, self._rows)).encode())


def _append(path: Path, text: str) -> None:
    with writing(path), path.open("a") as file:
        file.write(text)


def _table_rows(columns: list[str], rows: list[Any]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


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


class Display:
    """A progress display, used as a context manager; this one has no output.

    `report` is called after every row of metrics, `note` for other events.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def report(self, step: int, values: dict[str, float], left: float) -> None:
        """Show the metrics of `step`, and `left`, the estimated seconds that remain."""

    def note(self, text: str) -> None:
        """Show a line of text."""


def open_display(steps: int, done: int, active: bool, stream: TextIO | None = None) -> Display:
    """Return the display on `stream` (default: standard output) of a run of `steps`, after `done`."""
    if not active:
        return Display()
    output: TextIO = sys.stdout if stream is None else stream
    return LiveDisplay(steps, done, output) if output.isatty() else LineDisplay(steps, output)


class LineDisplay(Display):
    """A display with one plain line per report."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self.steps, self.stream = steps, stream

    def report(self, step: int, values: dict[str, float], left: float) -> None:
        """Print the step, its metrics and the remaining time on one line."""
        self.note(f"step {step}/{self.steps}  {summary(values)}  {duration(left)} left")

    def note(self, text: str) -> None:
        """Print `text` and flush, so that a log file can be followed."""
        print(text, file=self.stream, flush=True)


class LiveDisplay(Display):
    """A progress bar at the bottom of the terminal; evaluations and notes scroll above it."""

    def __init__(self, steps: int, done: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
        )
        # Refreshed only at reports: a refresh thread would take time from the training loop.
        self.progress = Progress(*columns, console=Console(file=stream), auto_refresh=False)
        self.bar: TaskID = self.progress.add_task("", total=steps, completed=done, text="")
        self.validation: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.refresh()
        self.progress.stop()

    def report(self, step: int, values: dict[str, float], left: float) -> None:
        """Advance the bar, and print evaluations above it."""
        evaluated = {name: value for name, value in values.items() if name.startswith("valid_")}
        if evaluated:
            self.validation = evaluated
            self.note(f"step {step}  {summary(evaluated)}")
        shown = summary({**values, **dict(list(self.validation.items())[:1])})
        self.progress.update(self.bar, completed=step, text=f"{shown}  {duration(left)} left", refresh=True)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self.progress.console.print(text, markup=False, highlight=False)


def summary(values: dict[str, float]) -> str:
    """Return the main metrics on one line: the loss, the speed, and all validation metrics."""
    parts = [f"loss {values['loss']:.4f}"] if "loss" in values else []
    for name, value in values.items():
        if name.endswith(PER_SECOND):
            parts.append(f"{value:,.0f} {name.removesuffix(PER_SECOND)}/s")
    parts += [
        f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items() if name.startswith("valid_")
    ]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds in the form H:MM:SS, for example 3725.0 as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
