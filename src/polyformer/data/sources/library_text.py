"""Texts without network access, part of Python: the default text, and the sources of the standard library.

The latter are about two million characters in whole files, evenly spaced over the library, so that their size
is similar in every version of Python, even if some modules are missing. Licence: PSF. Tests, tables,
generated code and parts that Linux distributions package separately are left out.
"""

import importlib
import sysconfig
from pathlib import Path

from polyformer.core.errors import InputError
from polyformer.data.sources.held_out import EvenSelection

LIBRARY = "python:library"
"""The name of this text as the `path` of data."""

CHARACTERS = 2_000_000

LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests"),
    *("__phello__", "encodings", "pydoc_data"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
}
"""Folders with files that are not read."""


def library_files() -> list[Path]:
    """Return the files of the text, about `CHARACTERS` in total, in the order of their paths.

    Raises `InputError` if this Python lacks the sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        filter(is_read, (path.relative_to(root) for path in root.rglob("*.py"))), key=Path.as_posix
    )
    sizes = [(root / path).stat().st_size for path in files]
    if not sum(sizes):
        raise InputError(
            f"data: this Python comes without the sources of its library (there are none in {root}): "
            "name a text of your own with --data PATH"
        )
    due = EvenSelection(min(1.0, CHARACTERS / sum(sizes)))
    return [root / path for path, size in zip(files, sizes) if due.holds(size)]


def library_documents() -> list[str]:
    """Return the text of every file, in order."""
    return [path.read_text(encoding="utf-8", errors="replace") for path in library_files()]


def is_read(path: Path) -> bool:
    """Return whether a file of the library, given by its relative path, belongs to the text."""
    generated = path.name.startswith("_sysconfigdata") or any(
        part.startswith("config-") for part in path.parts
    )
    return not generated and LEFT_OUT.isdisjoint(path.parts[:-1])


def default_documents() -> list[str]:
    """Return English prose, about 450 kB in some 80 documents, in the order of their names.

    Source: `pydoc_data.topics`, the text of Python's `help("...")`; it differs between versions of Python.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError) as error:
        raise InputError(
            "data: this Python comes without its help texts (pydoc_data), which are the default text: "
            "name a text of your own with --data PATH"
        ) from error
    return [text for _, text in sorted(topics.items()) if text.strip()]
