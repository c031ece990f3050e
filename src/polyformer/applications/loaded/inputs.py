"""The inputs of a loaded model: texts, files and images, single or several."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.paths import checked_path
from polyformer.data.sources.files import whole_text


class Verbatim(str):
    """A text that is used as it is, even if a file has this name, such as a line of a file."""


def several(inputs: Any) -> tuple[list[Any], bool]:
    """Return the inputs as a list, and whether there was a single input instead of several.

    A text, a path, an image, a tuple (a pair of texts) and a mapping are single inputs. Raises `InputError`
    for a value that is neither an input nor iterable.
    """
    if isinstance(inputs, str | bytes | os.PathLike | tuple | Mapping) or is_picture(inputs):
        return [inputs], True
    if not isinstance(inputs, Iterable):
        raise InputError(f"expected an input or a list of inputs, got {quote(inputs)}")
    return list(inputs), False


def is_picture(value: object) -> bool:
    """Return whether `value` is an image of Pillow; Pillow is not imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def text_of(name: str, value: object) -> str:
    """Return a text: a string as it is, or the whole text of the file of a path.

    Raises `InputError` that names the argument `name` for another type, for a file that cannot be read, and
    for a string that is the name of an existing file.
    """
    if isinstance(value, os.PathLike):
        return whole_text(checked_path(Path(value)))
    if not isinstance(value, str):
        raise InputError(f"{name}: expected a text or the pathlib.Path of its file, got {quote(value)}")
    if not isinstance(value, Verbatim) and os.path.isfile(value):
        raise InputError(
            f"{name}: expected a text, got the name of a file, {quote(value)}; read the text of the file "
            f"with pathlib.Path({quote(value)})"
        )
    return str(value)


def texts_of(name: str, values: Iterable[object]) -> list[str]:
    """Return `text_of` of each value."""
    return [text_of(name, value) for value in values]


def pair_of(name: str, value: object) -> tuple[str, str]:
    """Return both texts of a pair, which is a tuple or a list; raise `InputError` for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InputError(f"{name}: expected a pair of texts, (first, second), got {quote(value)}")
    first, second = texts_of(name, value)
    return first, second
