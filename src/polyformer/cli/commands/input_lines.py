"""The texts that a command reads: its arguments TEXT, or the lines of standard input."""

import itertools
import sys
from collections.abc import Iterator, Sequence

from polyformer.core.errors import InputError, quote

LINES = 256  # read at once: enough to sort by length, few enough to show results early


def input_lines(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield `texts`, or else the lines of standard input, in lists of at most `LINES`.

    Raises `InputError` where a text is empty, and where there are neither texts nor lines.
    """
    if texts:
        if not all(text.strip() for text in texts):
            raise InputError("TEXT: expected some text, got none")
        for start in range(0, len(texts), LINES):
            yield list(texts[start : start + LINES])
        return
    if sys.stdin.isatty():
        raise InputError('TEXT: give a text in quotes, or lines on standard input (command "..." < FILE)')
    lines = (line.rstrip("\r\n") for line in sys.stdin)
    while batch := list(itertools.islice(lines, LINES)):
        yield batch


def split_at_tabs(lines: list[str]) -> tuple[list[str], list[str]]:
    """The texts before and after the tab of each line; raises `InputError` unless each has one."""
    pairs = [line.split("\t") for line in lines]
    for line, texts in zip(lines, pairs):
        if len(texts) != 2:
            raise InputError(
                f"TEXT: expected two texts with a tab between them in each line, got {quote(line)}"
            )
    return [first for first, _ in pairs], [second for _, second in pairs]
