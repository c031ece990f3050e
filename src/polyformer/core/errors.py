"""Errors for users: what was given, what was expected, the way out.

`InputError` is a `ValueError`; the command line prints its message as one line and exits with status 2.
"""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Input that the library cannot use; the message names the argument and the way out."""


def unknown(what: str, given: object, known: Iterable[str]) -> InputError:
    """An error for the name `given` that is none of `known`, with the nearest names."""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    elif len(names) <= 12:
        hint = f"expected one of {', '.join(map(repr, names)) or 'nothing'}"
    else:
        hint = f"expected one of {len(names)} names, such as {', '.join(map(repr, names[:6]))}"
    return InputError(f"unknown {what} {given!r}: {hint}")
