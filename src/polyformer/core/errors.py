"""Errors for users: what was given, what was expected, the way out.

`InputError` is a `ValueError`; the command line prints its message as one line and exits with status 2.
What was given may be anything, as large as a file or nested without end: `quote` shows the beginning of it,
at a cost that does not depend on its size.
"""

import difflib
import itertools
import reprlib
from collections.abc import Iterable
from typing import Any

QUOTED = 200
"""The most characters that a message shows of a value."""

MESSAGE = 2000
"""The most characters of a message; of a longer one the middle is left out."""


class InputError(ValueError):
    """Input that the library cannot use; the message names the argument and the way out."""

    def __init__(self, message: object = ""):
        super().__init__(shortened(str(message), MESSAGE))


class _Quoting(reprlib.Repr):
    """The standard library's short `repr`, also for long bytes and integers, with mappings in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxother = 3, 6, 120, 160

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """At most `maxdict` items, in the mapping's own order."""
        if level <= 0 and x:
            return "{...}"
        pairs = itertools.islice(x.items(), self.maxdict)
        shown = [f"{self.repr1(name, level - 1)}: {self.repr1(value, level - 1)}" for name, value in pairs]
        return "{" + ", ".join([*shown, *(["..."] if len(x) > self.maxdict else [])]) + "}"

    def repr_int(self, x: int, level: int) -> str:
        """Up to 128 bits as digits; beyond, only how many bits there are."""
        return repr(x) if x.bit_length() <= 128 else f"<an integer of {x.bit_length()} bits>"

    def repr_bytes(self, x: bytes, level: int) -> str:
        """At most the first `maxstring` bytes."""
        return repr(x[: self.maxstring]) + ("..." if len(x) > self.maxstring else "")


_QUOTING = _Quoting()


def quote(value: object) -> str:
    """`repr(value)`, or its beginning: at most 200 characters, whatever the value is."""
    return shortened(_QUOTING.repr(value), QUOTED)


def shortened(text: str, most: int) -> str:
    """`text`, without its middle where it has more than `most` characters."""
    if len(text) <= most:
        return text
    tail = (most - 5) // 3
    return f"{text[: most - 5 - tail]} ... {text[len(text) - tail :]}"


def reason_of(error: Exception) -> str:
    """The first line of what an error of another library says; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unknown(what: str, value: object, known: Iterable[str]) -> InputError:
    """An error for the name `value` that is none of `known`, with the nearest names."""
    names = sorted(known)
    near = difflib.get_close_matches(value[:QUOTED], names, n=3, cutoff=0.5) if isinstance(value, str) else ()
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    elif len(names) <= 12:
        hint = f"expected one of {', '.join(map(repr, names)) or 'nothing'}"
    else:
        hint = f"expected one of {len(names)} names, such as {', '.join(map(repr, names[:6]))}"
    return InputError(f"unknown {what} {quote(value)}: {hint}")
