"""The tables that runs have written, those of several seeds as one with means and ranges."""

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

Row = list[str]


def read(file: Path) -> tuple[Row, list[Row]]:
    """Head and rows of a CSV file."""
    with file.open(encoding="utf-8", newline="") as text:
        head, *rows = csv.reader(text)
    return head, rows


def over_seeds(head: Row, by_seed: Sequence[list[Row]]) -> list[Row]:
    """Row by row over the seeds: what is the same in all stays, of other numbers the mean and the range.

    Where runs of several seeds have other numbers of rows, all of them, one seed after another.
    """
    if len({len(rows) for rows in by_seed}) != 1:
        return [list(map(shown, row)) for rows in by_seed for row in rows]
    return [[summary([row[column] for row in rows]) for column in range(len(head))] for rows in zip(*by_seed)]


def split_by_seed(head: Row, rows: list[Row]) -> tuple[Row, list[list[Row]]]:
    """The rows of each seed without the column `seed`; all as those of one where there is no such column."""
    if "seed" not in head:
        return head, [rows]
    place = head.index("seed")
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row[place], []).append(row[:place] + row[place + 1 :])
    return head[:place] + head[place + 1 :], list(parts.values())


def summary(cells: Sequence[str]) -> str:
    """A cell of several runs."""
    if len({*cells}) == 1:
        return shown(cells[0])
    numbers = [_number(cell) for cell in cells]
    values = [number for number in numbers if number is not None]
    if len(values) < len(cells):
        return ", ".join(map(shown, cells))
    return f"{statistics.fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def shown(cell: str) -> str:
    """A cell with at most four digits of what is no whole number."""
    number = _number(cell)
    return cell if number is None or cell.lstrip("-").isdigit() else f"{number:.4g}"


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
