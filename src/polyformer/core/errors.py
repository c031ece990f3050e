"""Errors for users: the given value, the expected value, the way out.

`InputError` is a `ValueError`; the command line prints its message as one line and exits with status 2. The
given value may be anything, as large as a file or nested without end: `quote` shows its beginning, at a cost
that does not depend on its size.
"""

import itertools
import reprlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

QUOTED, MESSAGE = 200, 2000
"""The most characters of a quoted value and of a message."""


class InputError(ValueError):
    """Input that the library cannot use; the message names the argument and the way out."""

    def __init__(self, message: object = ""):
        super().__init__(shortened(str(message), MESSAGE))


class Caution(UserWarning):
    """A warning of this library about the caller's models or files; commands print it in one line."""


INNER = {__name__.partition(".")[0], "torch", "contextlib", "functools"}
"""Packages whose lines no caller wrote: this one, and what wraps its functions."""


def caution(message: str) -> None:
    """Warn with the category `Caution`, at the line of the caller outside of this package.

    The line is looked up, because the number of calls between it and the warning depends on wrappers.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INNER:
        frame = frame.f_back
    place, names = frame.f_code.co_filename, frame.f_globals
    seen = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, Caution, place, frame.f_lineno, names.get("__name__"), seen)


class _Quoting(reprlib.Repr):
    """The standard library's short `repr`, also for long bytes and integers; mappings keep their order."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxother = 3, 6, 120, 160

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return at most `maxdict` items, in the order of the mapping."""
        if level <= 0 and x:
            return "{...}"
        pairs = itertools.islice(x.items(), self.maxdict)
        shown = [f"{self.repr1(name, level - 1)}: {self.repr1(value, level - 1)}" for name, value in pairs]
        return "{" + ", ".join([*shown, *(["..."] if len(x) > self.maxdict else [])]) + "}"

    def repr_int(self, x: int, level: int) -> str:
        """Return up to 128 bits as digits; above that only the number of bits."""
        return repr(x) if x.bit_length() <= 128 else f"<an integer of {x.bit_length()} bits>"

    def repr_bytes(self, x: bytes, level: int) -> str:
        """Return at most the first `maxstring` bytes."""
        return repr(x[: self.maxstring]) + ("..." if len(x) > self.maxstring else "")


_QUOTING = _Quoting()


def quote(value: object) -> str:
    """Return `repr(value)` or its beginning: at most 200 characters for any value."""
    return shortened(_QUOTING.repr(value), QUOTED)


def shortened(text: str, most: int) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    tail = (most - 5) // 3
    return f"{text[: most - 5 - tail]} ... {text[len(text) - tail :]}"


def reason_of(error: Exception) -> str:
    """Return the first line of another library's error message; the error's class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unknown(what: str, value: object, known: Iterable[str]) -> InputError:
    """Return an error for the name `value`, which is not in `known`, with the nearest names."""
    import difflib  # loads re, which nothing but an error needs

    names = sorted(known)
    near = difflib.get_close_matches(value[:QUOTED], names, n=3, cutoff=0.5) if isinstance(value, str) else ()
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    elif len(names) <= 12:
        hint = f"expected one of {', '.join(map(repr, names)) or 'nothing'}"
    else:
        hint = f"expected one of {len(names)} names, such as {', '.join(map(repr, names[:6]))}"
    return InputError(f"unknown {what} {quote(value)}: {hint}")
