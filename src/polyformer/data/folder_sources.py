"""A folder per label: texts (.txt) or images with the name of their folder as label.

    reviews/pos/1.txt  reviews/pos/2.txt  reviews/neg/1.txt
    pets/train/cat/1.jpg  pets/train/dog/1.jpg  pets/test/cat/7.jpg        with splits, by their usual names

Images directly in the folder have no label. Files are read in the order of their names; hidden files and
files that accompany data (`is_stray`) are left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.core.limits import FILE_OF_A_LABEL
from polyformer.core.paths import leaves_folder
from polyformer.data.compressed_files import opened
from polyformer.data.image_decoding import SUFFIXES, read_image

Row = dict[str, Any]


STRAY = re.compile(
    r"_*(readme|licen[cs]e|copying|notice|citation|authors|changelog|(md5|sha\d+)(sums?)?|checksums?|manifest)"
    r"([-_.].*)?|_*(about|terms|copyright|credits|disclaimer|contributors)(\.\w+)?"
    r"|thumbs\.db|desktop\.ini|.*\.(md5|sha\d+|md|rst|bib|html?|pdf)",
    re.IGNORECASE,
)
"""Names of files that accompany data but contain none."""


def is_stray(path: Path) -> bool:
    """Return whether the name belongs to documentation of the data: README, LICENSE, checksums, ..."""
    return STRAY.fullmatch(path.name) is not None


def label_folders(path: Path) -> list[Path]:
    """Return the folders in `path` that contain texts or images, in the order of their names."""
    return [folder for folder in _entries(path) if folder.is_dir() and any(map(_holds, _entries(folder)))]


def has_images(path: Path) -> bool:
    """Return whether the folder itself contains images."""
    return any(path.is_file() and path.suffix.lower() in SUFFIXES for path in _entries(path))


def folder_rows(path: Path, source: Path | None = None) -> Iterator[Row]:
    """Yield {text, label} or {image, label} of every file, label by label; {image} without folders.

    Raises `InputError` for a link out of the folder `source` (by default `path`), which may be somebody
    else's.
    """
    folders = label_folders(path)
    for folder in folders or [path]:
        label = {"label": folder.name} if folders else {}
        for file in _entries(folder):
            if not _holds(file):
                kind = "a folder" if file.is_dir() else "neither a .txt nor an image"
                raise InputError(f"{file}: {kind}; expected only texts or images in the folder of a label")
            if leaves_folder(source or path, file):
                raise InputError(
                    f"{file} is a link to a file outside of {source or path}; put the file itself there"
                )
            yield {**_content(file), **label}


def _holds(file: Path) -> bool:
    return file.is_file() and file.suffix.lower() in (".txt", *SUFFIXES)


def _content(file: Path) -> Row:
    if file.suffix.lower() in SUFFIXES:
        return next(read_image(file))
    with opened(file) as text:
        content = text.read(FILE_OF_A_LABEL + 1)
    if len(content) > FILE_OF_A_LABEL:
        raise InputError(f"{file}: longer than {FILE_OF_A_LABEL} characters; split it")
    return {"text": content}


def _entries(path: Path) -> list[Path]:
    try:
        shown = (entry for entry in path.iterdir() if not entry.name.startswith("."))
        return sorted(entry for entry in shown if entry.is_dir() or not is_stray(entry))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
