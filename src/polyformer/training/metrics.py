"""What a run measured, one row per step that has something to say: OUT/metrics.jsonl and OUT/metrics.csv."""

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.figures import new_figure
from polyformer.core.files import atomic_write, reading, writing
from polyformer.core.parsing import parse_json
from polyformer.training.config import ReportingConfig

LINES, TABLE = "metrics.jsonl", "metrics.csv"

Row = dict[str, float | None]


def read_metrics(run: str | Path) -> list[Row]:
    """The rows of a run's metrics.jsonl, in order; a last line cut short by a kill is left out."""
    path = Path(run) / LINES
    with reading(path):
        lines = path.read_bytes().splitlines(keepends=True)
    rows = [
        parse_json(line, f"{path}, line {number}", dict)
        for number, line in enumerate(lines, 1)
        if line.endswith(b"\n")
    ]
    for number, row in enumerate(rows, 1):
        if type(row.get("step")) is not int:
            raise InputError(
                f"{path}, line {number}: expected a row of metrics with its step; remove the line"
            )
    return rows


def check_reporting(config: ReportingConfig, out: Path) -> None:
    """Raises `InputError` for what would stop the reports of the run in `out`: before anything is written."""
    if config.curves:
        new_figure(1, 1)
    if config.tensorboard:
        _summary_writer()
    if (out / LINES).exists():
        read_metrics(out)


class MetricsLog:
    """Appends rows to both files; the JSON lines are the record, the table is made from them.

    Going on from step `after`, the rows of later steps, which will be run again, are dropped.
    With `tensorboard` the rows also go to events in OUT/tensorboard.
    """

    def __init__(self, out: Path, after: int, tensorboard: bool) -> None:
        self.lines, self.table = out / LINES, out / TABLE
        earlier = read_metrics(out) if after and self.lines.exists() else []
        self._rows = [row for row in earlier if (row["step"] or 0) <= after]
        self._columns: list[str] = []
        self._rewrite()
        self._events = None
        if tensorboard:
            self._events = _summary_writer()(str(out / "tensorboard"), purge_step=after + 1)

    @property
    def seconds(self) -> float:
        """The time that the rows so far say the run has taken."""
        return max((row.get("seconds") or 0.0 for row in self._rows), default=0.0)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a row. What is not finite is written as nothing: neither format has a word for it."""
        row: Row = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._rows.append(row)
        if set(row) <= set(self._columns):
            _append(self.lines, json.dumps(row) + "\n")
            _append(self.table, _table_rows(self._columns, [row]))
        else:
            self._rewrite()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def sync(self) -> None:
        """Everything written is on the disk: done before a checkpoint that counts on it."""
        for path in (self.lines, self.table):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Flush and close the TensorBoard events, if any."""
        if self._events is not None:
            self._events.close()

    def _rewrite(self) -> None:
        """Both files anew: at the start, and when a column appears that the table does not have."""
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


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise InputError(
            "tensorboard: it was asked for but is not installed; pip install 'polyformer[tensorboard]', "
            "or leave it out: metrics.csv and metrics.jsonl are written anyway"
        ) from error
    return SummaryWriter
