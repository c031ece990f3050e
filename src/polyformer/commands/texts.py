"""The texts that a command works on: one from its arguments, or the lines of standard input."""

import itertools
import sys
from collections.abc import Iterator

from polyformer.core.errors import InputError

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
