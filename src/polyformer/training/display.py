"""Progress output of a run: a progress bar on a terminal, otherwise a line per report."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID


class Display(Protocol):
    """Interface of a progress display, used as a context manager.

    `report` is called after every row of metrics, `note` for other events.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def report(self, step: int, values: dict[str, float], left: float) -> None:
        """Show the metrics of `step`, and `left`, the estimated seconds that remain."""
        ...

    def note(self, text: str) -> None:
        """Show a line of text."""
        ...


def open_display(steps: int, done: int, active: bool, stream: TextIO | None = None) -> Display:
    """Return the display on `stream` (default: standard output) of a run of `steps`, after `done`."""
    if not active:
        return SilentDisplay()
    output: TextIO = sys.stdout if stream is None else stream
    return LiveDisplay(steps, done, output) if output.isatty() else LineDisplay(steps, output)


class SilentDisplay:
    """A display without output."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def report(self, step: int, values: dict[str, float], left: float) -> None:
        """Do nothing."""
        pass

    def note(self, text: str) -> None:
        """Do nothing."""
        pass


class LineDisplay(SilentDisplay):
    """A display with one plain line per report."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self.steps, self.stream = steps, stream

    def report(self, step: int, values: dict[str, float], left: float) -> None:
        """Print the step, its metrics and the remaining time on one line."""
        self.note(f"step {step}/{self.steps}  {summary(values)}  {duration(left)} left")

    def note(self, text: str) -> None:
        """Print `text` and flush, so that a log file can be followed."""
        print(text, file=self.stream, flush=True)


class LiveDisplay:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    parts += [f"{values['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in values else []
    parts += [
        f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items() if name.startswith("valid_")
    ]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds in the form H:MM:SS, for example 3725.0 as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
