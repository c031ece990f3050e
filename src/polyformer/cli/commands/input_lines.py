"""Read the input texts of a command: its arguments TEXT, or the lines of standard input."""

import itertools
import sys
from collections.abc import Iterator, Sequence

from polyformer.core.errors import InputError, quote

LINES = 256  # per batch: enough to sort by length, few enough to print results early


def input_lines(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield `texts`, or the lines of standard input if there are none, in lists of at most `LINES`.

    Raises `InputError` if a text is empty, and if there are neither texts nor lines.
    """
    if texts:
        if not all(text.strip() for text in texts):
            raise InputError("TEXT: expected a text, got only white space")
        for start in range(0, len(texts), LINES):
            yield list(texts[start : start + LINES])
        return
    if sys.stdin.isatty():
        raise InputError(
            'TEXT is missing: give a text in quotes, or lines on standard input (command "..." < FILE)'
        )
    # A byte order mark, as in files, is no part of the first text.
    lines = (
        line.rstrip("\r\n").removeprefix("" if number else "\ufeff") for number, line in enumerate(sys.stdin)
    )
    while batch := list(itertools.islice(lines, LINES)):
        yield batch


def split_at_tabs(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts before and after the tab of each line; raise `InputError` for other lines."""
    pairs = [line.split("\t") for line in lines]
    for line, texts in zip(lines, pairs):
        if len(texts) != 2:
            raise InputError(f"TEXT: expected two texts separated by a tab in each line, got {quote(line)}")
    return [first for first, _ in pairs], [second for _, second in pairs]
