"""Sources in libraries: texts that are part of Python, and the data sets of the library `datasets`.

The texts need no network: the default text, and the sources of the standard library, about two million
characters in whole files, evenly spaced over the library, so that their size is similar in every version of
Python, even if some modules are missing. Licence: PSF. Tests, tables, generated code and parts that Linux
distributions package separately are left out.

A folder of `save_to_disk` has Arrow files, and JSON files that describe them. The folder may be somebody
else's. `datasets` follows every path in it when it decodes an image, also to other files of this machine and
to addresses of the network, so the rows are read here as they are stored. A path is followed only inside the
folder.

Data sets of the hub are read as a stream: "hub:owner/name", "hub:owner/name:part". A data set may name its
files and images by any path or address. Only those on the hub are read, since others are files of this
machine or servers of its network.
"""

import importlib
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote, reason_of
from polyformer.core.files import open_file, read_json
from polyformer.core.paths import leaves_folder
from polyformer.core.ranges import EXPANDED, EXPANSION
from polyformer.data.formats.images import IMAGE, read_image
from polyformer.data.sources.files import Remote, too_large
from polyformer.data.sources.held_out import EvenSelection

LIBRARY = "python:library"
"""The name of the sources of the standard library as the `path` of data."""

CHARACTERS = 2_000_000
"""The size of their text."""

LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests"),
    *("__phello__", "encodings", "pydoc_data"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
}
"""Folders of the standard library with files that are not read."""


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


Row = dict[str, Any]

STATE, SPLITS, INFO = "state.json", "dataset_dict.json", "dataset_info.json"
ROWS = 256
"""Rows that are converted to Python values at once."""

Open = Callable[[str], bytes]
"""A function that returns the bytes of the image at a path in a data set, or refuses the path."""


def is_saved(path: Path) -> bool:
    """Return whether `path` is a directory written by `save_to_disk`."""
    return any((path / name).is_file() for name in (STATE, SPLITS))


def saved_splits(path: Path) -> list[str]:
    """Return the splits of a saved data set; an empty list for a data set without splits."""
    if (path / STATE).is_file():
        return []
    splits = read_json(path / SPLITS, dict).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) and _is_name(name) for name in splits):
        raise InputError(f"{path / SPLITS}: damaged: expected names of folders, got {quote(splits)}")
    return splits


def saved_rows(folder: Path, source: Path) -> Iterator[Row]:
    """Yield the rows of a split in the data set `source`, with names of classes instead of their numbers.

    Raises `InputError` for a damaged data set, and for a path that leads out of it.
    """
    if leaves_folder(source, folder):
        raise InputError(f"{folder} is a link to a folder outside of {source}; put the folder itself there")
    state, features = read_json(folder / STATE, dict), read_json(folder / INFO, dict).get("features") or {}
    columns, files = state.get("_format_columns"), state.get("_data_files")
    listed = isinstance(files, list) and all(isinstance(file, dict) for file in files)
    names = [file.get("filename") for file in files] if isinstance(files, list) and listed else [None]
    if not isinstance(features, dict) or not all(isinstance(name, str) and _is_name(name) for name in names):
        raise InputError(
            f"{folder}: a damaged data set: expected names of its files in {STATE} and columns in {INFO}, "
            f"got {quote(files)} and {quote(features)}"
        )
    for name in names:
        for row in _arrow_rows(folder, folder / str(name)):
            kept = row if not isinstance(columns, list) else {x: row[x] for x in columns if x in row}
            yield plain_row(kept, features, lambda path: _image(folder, path), str(folder))


def plain_row(row: Row, features: dict[str, Any], open_image: Open, where: str) -> Row:
    """Return a row as stored with names of classes, and with the bytes of images that are stored as paths.

    features: the features of `datasets` by column, as plain data.
    """
    return {name: _plain(value, features.get(name), open_image, where) for name, value in row.items()}


def _plain(value: Any, feature: Any, open_image: Open, where: str) -> Any:
    if not isinstance(feature, dict):
        return value
    if isinstance(value, list):
        return [_plain(item, feature.get("feature"), open_image, where) for item in value]
    if feature.get("_type") == "Image" and isinstance(value, dict) and value.get("bytes") is None:
        path = value.get("path")
        return {**value, "bytes": open_image(path)} if isinstance(path, str) else value
    names = feature.get("names")
    if isinstance(value, int) and isinstance(names, list):
        if value >= len(names):
            raise InputError(f"{where}: expected a class below {len(names)}, got {value}")
        return names[value] if value >= 0 else None  # -1: a hidden label
    return value


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}


def _image(folder: Path, path: str) -> bytes:
    """Return the bytes of an image inside the folder; links in the path count as what they lead to."""
    if "\0" in path or leaves_folder(folder, folder / path):
        raise InputError(
            f"{folder}: a row names the image {quote(path)}, which is outside of the data set; write the "
            "data set again where the images are, which includes their bytes"
        )
    return bytes(next(read_image(folder / path))[IMAGE])


def _arrow_rows(folder: Path, file: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow stream as plain values."""
    import datasets  # noqa: F401  registers its types of arrays
    import pyarrow

    if leaves_folder(folder, file):
        raise InputError(f"{file} is a link to a file outside of the data set; put the file itself there")
    try:
        with open_file(file) as raw, pyarrow.ipc.open_stream(raw) as batches:
            left = max(EXPANDED, EXPANSION * file.stat().st_size)
            for batch in batches:
                left -= batch.nbytes
                if left < 0:
                    raise too_large(file)
                batch.validate(full=True)  # otherwise damaged offsets would read any memory
                for start in range(0, batch.num_rows, ROWS):
                    yield from batch.slice(start, ROWS).to_pylist()
    except FileNotFoundError as error:
        raise InputError(f"{folder}: a damaged data set: no such file: {file}") from error
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, MemoryError) as error:
        raise InputError(f"{folder}: a damaged data set ({reason_of(error)})") from error


HUB = "hub:"
_DATA_SETS = "hf://datasets/"


def hub_splits(path: str) -> list[str]:
    """Return the splits of a data set; raises `InputError` if it names files outside of the hub."""
    import datasets

    with _reading_hub(path) as (name, part):
        files = datasets.load_dataset_builder(name, part).config.data_files or {}
        for file in (file for names in files.values() for file in names):
            if not str(file).startswith(_DATA_SETS):
                raise InputError(f"{path}: names the file {quote(str(file))}, which is not on the hub")
        return list(datasets.get_dataset_split_names(name, part))


def hub_rows(path: str, split: str) -> Iterator[Row]:
    """Yield the rows of a split, with the names of classes instead of their numbers."""
    import datasets

    with _reading_hub(path) as (name, part):
        rows = datasets.load_dataset(name, part, split=split, streaming=True)
        stored = rows.decode(False) if rows.features else rows
        features: Any = (rows.features or datasets.Features()).to_dict()
        for row in stored:
            yield plain_row(row, features, lambda image: hub_image(path, image), path)


def hub_image(source: str, path: str) -> bytes:
    """Return the bytes of an image of the data set `source`: a file on the hub, or in a zip file there.

    Raises `InputError` for any other path.
    """
    import fsspec

    *inside, file = path.split("::")
    if not file.startswith(_DATA_SETS) or not all(part.startswith("zip://") for part in inside):
        raise InputError(f"{source}: a row names the image {quote(path)}, which is not on the hub")
    system, root = fsspec.core.url_to_fs(path)
    return bytes(next(read_image(Remote(system, root, path)))[IMAGE])


@contextmanager
def _reading_hub(path: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the part of a data set; any failure inside becomes an `InputError`."""
    name, _, part = path.removeprefix(HUB).partition(":")
    try:
        yield name, part or None
    except InputError:
        raise
    except Exception as error:  # network, hub and data sets raise different exceptions
        raise InputError(
            f"{path}: cannot be read from the hub ({reason_of(error)}); check the name and the network, "
            "or download it elsewhere and give the directory of its save_to_disk"
        ) from error
