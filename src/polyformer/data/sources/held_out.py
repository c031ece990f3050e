"""Held-out rows: their choice, and the form of a text in which equal rows are found.

Held-out rows are evenly spaced, without randomness or memory, or whole groups. Texts without case, spaces and
punctuation show which rows are nearly equal.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


def normalized(value: Any) -> Any:
    """Return a hashable form of a text, or of a list of texts, without case, spaces and punctuation.

    A text of nothing else, and a value of another type, is returned unchanged.
    """
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    if not isinstance(value, str):
        return value
    if value.isascii():  # many times as fast as the pattern
        return value.lower().encode().translate(None, ASCII_MARKS) or value
    return _marks().sub("", unicodedata.normalize("NFC", value).casefold()).encode() or value


def is_mark(character: str) -> bool:
    """Return whether a character is a space, punctuation or a control character; vowel signs are not."""
    category = unicodedata.category(character)
    return category[0] in "PZ" or category in ("Cc", "Cf")


ASCII_MARKS = bytes(code for code in range(128) if is_mark(chr(code)))


@functools.cache
def _marks() -> re.Pattern[str]:
    """Return the pattern of marks in the basic plane, which has nearly all of them."""
    return re.compile(f"[{re.escape(''.join(filter(is_mark, map(chr, range(0x10000)))))}]+")


Row = dict[str, Any]


def split_rows(
    rows: list[Row], needs: Sequence[str], fraction: float, together: str | None = None
) -> tuple[list[Row], list[Row]]:
    """Return the rows to keep and the held-out rows, at least one; of a few texts, the ends are held out.

    together: a column; all rows with the same value, without case, spaces and punctuation, are kept or held
    out together if there are several values.
    """
    if together is not None:
        return _split_groups(rows, fraction, together)
    if tuple(needs) == ("text",) and len(rows) * fraction < 2:
        return _cut(rows, fraction)
    kept, held = list(select_rows(rows, fraction, held=False)), list(select_rows(rows, fraction, held=True))
    return kept, held or [kept.pop()]


def select_rows(rows: Iterable[Row], fraction: float, held: bool) -> Iterator[Row]:
    """Yield the held-out rows (`held`) or the others: `fraction` of the rows, or of characters of texts."""
    due = EvenSelection(fraction)
    for row in rows:
        size = len(row["text"]) if row.keys() == {"text"} else 1
        if due.holds(size) == held:
            yield row


def select_groups(rows: Iterable[Row], fraction: float, held: bool, column: str) -> Iterator[Row]:
    """Yield the held-out rows (`held`) or the others, all rows of a value of `column` on one side.

    The side depends on the digest of the value, which needs no memory; about `fraction` of the values are
    held out.
    """
    for row in rows:
        value = normalized(row[column])
        content = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        number = int.from_bytes(blake2b(content, digest_size=8).digest())
        if (number < fraction * 2**64) == held:
            yield row


@dataclass
class EvenSelection:
    """A selection of evenly spaced items, with `fraction` of their total size."""

    fraction: float
    due: float = 0.0  # how much more should be held out by now

    def holds(self, size: float) -> bool:
        """Return whether the next item, of that size, is held out."""
        self.due += self.fraction * size
        chosen = self.due >= size / 2 and self.due > 0  # an empty text would otherwise always be due
        self.due -= size * chosen
        return chosen


def _split_groups(rows: list[Row], fraction: float, column: str) -> tuple[list[Row], list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(normalized(row[column]), []).append(row)
    due = EvenSelection(fraction)
    chosen = [due.holds(len(group)) for group in groups.values()]
    if not any(chosen):
        chosen[-1] = True
    sides: tuple[list[Row], list[Row]] = [], []
    for group, held in zip(groups.values(), chosen):
        sides[held].extend(group)
    return sides


def _cut(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Split a few long texts into beginnings and ends, after a line if possible, else after a word."""
    kept, held = [], []
    for text in (row["text"] for row in rows):
        limit = round(len(text) * (1 - fraction))
        place = text.rfind("\n", 0, limit) + 1 or text.rfind(" ", 0, limit) + 1
        kept.append({"text": text[:place]})
        held.append({"text": text[place:]})
    return [row for row in kept if row["text"].strip()], [row for row in held if row["text"].strip()]
