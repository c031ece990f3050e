"""The texts that a command works on: one from its arguments, or the lines of standard input."""

import itertools
import sys
from collections.abc import Iterator

from polyformer.core.errors import InputError, quote

LINES = 256  # read at once: enough to sort by length, few enough to see results as they come


def given(text: str | None) -> Iterator[list[str]]:
    """`text` alone, or standard input in lists of lines; raises `InputError` where there is nothing."""
    if text is not None:
        if not text.strip():
            raise InputError("TEXT: expected some text, got none")
        yield [text]
        return
    if sys.stdin.isatty():
        raise InputError('TEXT: give a text in quotes, or lines on standard input (command "..." < FILE)')
    lines = (line.rstrip("\r\n") for line in sys.stdin)
    while batch := list(itertools.islice(lines, LINES)):
        yield batch


def split_at_tabs(lines: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the tab of each line, and behind it."""
    parts = [line.split("\t") for line in lines]
    for line, fields in zip(lines, parts):
        if len(fields) != 2:
            raise InputError(
                f"TEXT: expected two texts with a tab between them in each line, got {quote(line)}"
            )
    return [fields[0] for fields in parts], [fields[1] for fields in parts]
