"""Read the input texts of a command: its arguments TEXT, a file (--file), or standard input.

A file is one text, and with --lines a text per line. Standard input has a text per line, as other commands
of a pipe read it; `--file -` reads it as a file.
"""

import io
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from polyformer.cli.commands.options import option
from polyformer.core.errors import InputError, quote

LINES = 256  # per batch: enough to sort by length, few enough to print results early

STANDARD_INPUT = "-"


def text_file(texts: str = "TEXT") -> Any:
    """Declare the option --file."""
    return option(
        f"read one text from this file instead of {texts}; - is standard input (see --lines)", metavar="PATH"
    )


def text_lines() -> Any:
    """Declare the option --lines."""
    return option("each line of --file or of standard input is a text", False)


def input_lines(texts: Sequence[str], file: str | None = None, lines: bool = False) -> Iterator[list[str]]:
    """Return the input texts in lists of at most `LINES`: `texts`, the text or lines of `file`, or lines.

    Without `texts` and `file` the lines are those of standard input.

    Raises:
        InputError: There are no texts, several sources, an empty text, or the name of a file as a text.
    """
    if texts and (file is not None or lines):
        flag = "--lines" if file is None else "--file"
        raise InputError(f"{flag}: not available with texts as arguments; leave out one of them")
    if texts:
        check_texts("TEXT", texts)
        return iter([list(texts[start : start + LINES]) for start in range(0, len(texts), LINES)])
    if file is not None:
        return _in_batches(_lines(file)) if lines else iter([[whole_text(file)]])
    check_standard_input()
    batches = _in_batches(_standard_lines())
    return batches if lines else _with_note(batches)


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Raise `InputError` if a text of the argument `name` is empty, or the name of an existing file."""
    if not all(text.strip() for text in texts):
        raise InputError(f"{name}: expected a text, got only white space")
    refuse_file_names(name, texts)


def refuse_file_names(name: str, texts: Sequence[str]) -> None:
    """Raise `InputError` if a text of the argument `name` is the name of an existing file."""
    for text in texts:
        if os.path.isfile(text):  # unlike the methods of Path, False for a text that is too long for a name
            raise InputError(
                f"{name}: expected a text, got the name of a file, {quote(text)}; read the text of the file "
                f"with --file {text} (add --lines if each line is a text)"
            )


def check_standard_input() -> None:
    """Raise `InputError` if standard input is a terminal."""
    if sys.stdin.isatty():
        raise InputError(
            'TEXT is missing: give a text in quotes, --file PATH, or lines on standard input (command "..." '
            "< FILE)"
        )


def whole_text(file: str) -> str:
    """Return the text of `file` without line ends at its end; raise `InputError` if there is none."""
    from polyformer.applications.loaded.base import Verbatim

    if file == STANDARD_INPUT:
        text = "".join(_standard_lines()).removeprefix("\ufeff")
    else:
        text = "".join(_lines(file))
    if not text.strip():
        raise InputError(f"--file: expected a text, got only white space in {file}")
    return Verbatim(text.rstrip("\r\n"))


def _lines(file: str) -> Iterator[str]:
    """Yield the lines of a file, which may be compressed, with their ends."""
    from polyformer.data.sources.files import lines_of, opened

    if file == STANDARD_INPUT:
        yield from _standard_lines()
        return
    path = Path(file)
    try:
        with opened(path) as opened_file:
            yield from lines_of(opened_file, path)
    except InputError as error:
        raise InputError(f"--file: {error}") from error


def _standard_lines() -> Iterator[str]:
    """Yield the lines of standard input, decoded as those of files are, with their ends."""
    from polyformer.data.sources.files import DecodedText

    check_standard_input()
    binary = getattr(sys.stdin, "buffer", None)
    if not isinstance(binary, io.BufferedReader):  # replaced by other text
        yield from sys.stdin
        return
    text = DecodedText(binary, "standard input")
    try:
        yield from text
    finally:
        text.detach()  # to leave standard input open


def _in_batches(lines: Iterable[str]) -> Iterator[list[Any]]:
    """Yield `lines` without their ends in lists of at most `LINES`."""
    from polyformer.applications.loaded.base import Verbatim

    # A byte order mark, as in files, is no part of the first text.
    texts = (
        Verbatim(line.rstrip("\r\n").removeprefix("" if number else "\ufeff"))
        for number, line in enumerate(lines)
    )
    while batch := list(itertools.islice(texts, LINES)):
        yield batch


def _with_note(batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield `batches` of standard input; if it has several lines, a note says that each is a text."""
    first = next(batches, [])
    if len(first) > 1:
        print(
            "polyformer: each line of standard input is a text (as with --lines); --file - reads one text",
            file=sys.stderr,
        )
    yield from itertools.chain([first] if first else [], batches)


def split_at_tabs(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts before and after the tab of each line; raise `InputError` for other lines."""
    from polyformer.applications.loaded.base import Verbatim

    pairs = [[*map(Verbatim, line.split("\t"))] for line in lines]
    for line, texts in zip(lines, pairs):
        if len(texts) != 2:
            raise InputError(f"TEXT: expected two texts separated by a tab in each line, got {quote(line)}")
    return [first for first, _ in pairs], [second for _, second in pairs]
