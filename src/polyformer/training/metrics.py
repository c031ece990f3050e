"""The metrics of a run, one row per reported step: OUT/metrics.jsonl and OUT/metrics.csv."""

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.figures import new_figure
from polyformer.core.files import atomic_write, open_file, reading, writing
from polyformer.core.optional_packages import needs_extra
from polyformer.core.parsing import parse_json
from polyformer.training.config import ReportingConfig

LINES, TABLE = "metrics.jsonl", "metrics.csv"

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
        if type(row.get("step")) is not int:
            raise InputError(
                f"{path}, line {number}: expected a row of metrics with its step; remove the line"
            )
    return rows


def check_reporting(config: ReportingConfig, out: Path) -> None:
    """Raise `InputError`, before anything is written, if the configured reports are impossible."""
    if config.curves:
        new_figure(1, 1)
    if config.tensorboard:
        _summary_writer()
    if (out / LINES).exists():
        read_metrics(out)


class MetricsLog:
    """A log that appends rows to both files; the JSON lines are the record, the table is derived from them.

    On a resume after step `after`, the rows of later steps are dropped, because these steps run again.
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
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def sync(self) -> None:
        """Flush all rows to the disk, before a checkpoint that relies on them."""
        for path in (self.lines, self.table):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Flush and close the TensorBoard events, if any."""
        if self._events is not None:
            self._events.close()

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


def _summary_writer() -> Any:
    otherwise = "or leave it out: metrics.csv and metrics.jsonl are written anyway"
    with needs_extra("tensorboard", "tensorboard: not installed", otherwise):
        from torch.utils.tensorboard.writer import SummaryWriter
    return SummaryWriter
