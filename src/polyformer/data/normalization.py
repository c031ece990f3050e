"""Texts without case, spaces and punctuation, to find rows that are nearly equal."""

import functools
import re
import unicodedata
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
