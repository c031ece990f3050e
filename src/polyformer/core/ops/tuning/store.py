"""The file of choices of a machine, in the user's cache folder. A damaged file counts as missing."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import filelock

from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write, json_bytes, read_json
from polyformer.core.ops.tuning.machine import description
from polyformer.core.paths import cache_folder

PIN = "POLYFORMER_TUNING"
FIXED = "fixed"

Choices = dict[str, dict[str, Any]]
"""The choices of sections, by name and threads: "products, 2 threads"."""


def path() -> Path:
    """Return the file of this machine."""
    key = hashlib.sha256(json.dumps(description(), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "tuning" / f"{key}.json"


def load(file: Path) -> Choices:
    """Return the choices in the file; raises `InputError` if it is missing or damaged."""
    data = read_json(file, dict)
    choices = data.get("choices")
    if not isinstance(choices, dict) or not all(isinstance(part, dict) for part in choices.values()):
        raise InputError(f"{file}: not a file written by polyformer tune")
    return choices


def stored() -> Choices:
    """Return this machine's choices so far; empty if the file is missing, damaged or unreadable."""
    try:
        return load(path())
    except (InputError, OSError):
        return {}


def store_choice(name: str, choice: dict[str, Any]) -> dict[str, Any]:
    """Add a choice to this machine's file; a choice that another process wrote first is kept and returned.

    A file that cannot be written is not an error: the next process will measure again.
    """
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(file.with_suffix(".lock"), timeout=10):
            choices = stored()
            if name in choices:
                return choices[name]
            save(file, {**choices, name: choice})
    except (InputError, OSError, RuntimeError):  # RuntimeError: there is no home folder
        pass
    return choice


def save(file: Path, choices: Choices) -> None:
    """Write the file atomically."""
    atomic_write(file, as_json(choices))


def as_json(choices: Choices) -> bytes:
    """Return the content of a file of choices."""
    return json_bytes({"machine": description(), "choices": choices})


def pinned() -> Choices | None:
    """Return the choices that `POLYFORMER_TUNING` pins, {} for the fixed choices; None for no pin."""
    pin = os.environ.get(PIN)
    if not pin:
        return None
    if pin == FIXED:
        return {}
    try:
        return load(Path(pin))
    except (InputError, OSError) as error:
        raise InputError(
            f'{PIN}: expected "{FIXED}" or a file of polyformer tune --out, got {quote(pin)}: {error}'
        ) from error
