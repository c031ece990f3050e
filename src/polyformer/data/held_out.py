"""Which rows are held out: evenly spread, which needs neither chance nor memory, or whole groups of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


def parted(
    rows: list[Row], needs: Sequence[str], fraction: float, together: str | None = None
) -> tuple[list[Row], list[Row]]:
    """The rows to keep and those held out, at least one; of a few texts, the ends are held out.

    together: a column; rows with the same value in it are all kept or all held out, where there is more than
    one value.
    """
    if together is not None:
        return _parted_groups(rows, fraction, together)
    if tuple(needs) == ("text",) and len(rows) * fraction < 2:
        return _cut(rows, fraction)
    kept, held = list(part(rows, fraction, held=False)), list(part(rows, fraction, held=True))
    return kept, held or [kept.pop()]


def part(rows: Iterable[Row], fraction: float, held: bool) -> Iterator[Row]:
    """The rows held out, or the others: `fraction` of the rows, of plain texts of their characters."""
    due = Due(fraction)
    for row in rows:
        size = len(row["text"]) if row.keys() == {"text"} else 1
        if due.holds(size) == held:
            yield row


@dataclass
class Due:
    """Which of a sequence of things are held out: evenly spread, `fraction` of their sizes together."""

    fraction: float
    due: float = 0.0  # how much should be held out beyond what is

    def holds(self, size: float) -> bool:
        """Whether the next one, of that size, is held out."""
        self.due += self.fraction * size
        chosen = self.due >= size / 2 and self.due > 0  # an empty text is not always due
        self.due -= size * chosen
        return chosen


def _parted_groups(rows: list[Row], fraction: float, column: str) -> tuple[list[Row], list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    due, chosen = 0.0, []
    for group in groups.values():
        due += fraction * len(group)
        chosen.append(due >= len(group) / 2)
        due -= len(group) * chosen[-1]
    if not any(chosen):
        chosen[-1] = True
    sides: tuple[list[Row], list[Row]] = [], []
    for group, held in zip(groups.values(), chosen):
        sides[held].extend(group)
    return sides


def _cut(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """The beginnings and the ends of a few long texts, cut after a line, else after a word."""
    kept, held = [], []
    for text in (row["text"] for row in rows):
        limit = round(len(text) * (1 - fraction))
        place = text.rfind("\n", 0, limit) + 1 or text.rfind(" ", 0, limit) + 1
        kept.append({"text": text[:place]})
        held.append({"text": text[place:]})
    return [row for row in kept if row["text"].strip()], [row for row in held if row["text"].strip()]
