"""Names of sources and their rows, and folders that have a folder for each label.

A folder per label has texts (.txt) or images, with the name of their folder as label:

    reviews/pos/1.txt  reviews/pos/2.txt  reviews/neg/1.txt
    pets/train/cat/1.jpg  pets/train/dog/1.jpg  pets/test/cat/7.jpg        with splits, by their usual names

Images directly in the folder have no label. Files are read in the order of their names; hidden files and
files that accompany data (`is_stray`) are left out.

Names of sources:

    None                     the default text (chapters of Python's language reference)
    "python:library"         the sources of Python's standard library
    "notes.txt", "a/*.csv"   a file, or every file that the pattern matches, in the order of their names,
                             without READMEs and the like
    "train.{en,de}.gz"       two parallel files with matching lines: the source, then the target
    "saved/"                 a directory written by `save_to_disk` of `datasets`
    "pets/"                  a directory with a folder per label: texts or images
    "minari:cart/mixed-v0"   recorded episodes, local or downloaded by Minari; or the folder of such episodes
    "s3://bucket/a-*.csv"    remote files (`polyformer.data.sources.files`): s3://, hf://, http://, ...
    "prepared/"              a folder of `polyformer data prepare`, or mix.yaml of them (`data.prepared.rows`)
    "hub:owner/name"         a data set of the Hugging Face hub; "hub:owner/name:part" if it has parts

Saved data sets, data sets of the hub and folders may contain several splits, identified by their usual names.
"""

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, cast

from polyformer.core.errors import InputError
from polyformer.core.paths import kind_of, leaves_folder
from polyformer.core.ranges import FILE_OF_A_LABEL
from polyformer.data.episodes import is_minari, minari_files, read_minari
from polyformer.data.formats.images import SUFFIXES, read_image
from polyformer.data.formats.readers import LOCAL, READERS, TABLES, Header, Row, format_of, read_pairs
from polyformer.data.prepared.rows import MIXTURES, is_prepared_source, open_prepared, prepared_files
from polyformer.data.sources.files import Remote, is_remote, opened, remote_files
from polyformer.data.sources.libraries import (
    HUB,
    LIBRARY,
    default_documents,
    hub_rows,
    hub_splits,
    is_saved,
    library_documents,
    library_files,
    saved_rows,
    saved_splits,
)

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


_PAIR = re.compile(r"(.*)\{([^{},]*),([^{},]*)\}(.*)")
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test", "t10k")}


Kind = Literal["default", "library", "hub", "prepared", "minari", "folder", "pair", "remote", "files"]


def kind_of_source(path: str | None) -> Kind:
    """Return the kind of the source `path`, from its name and from what is there.

    An existing file is the common case and comes first: nothing else can have its name, except for a
    mixture, and for names with a prefix or with braces.
    """
    if path is None:
        return "default"
    if Path(path).is_file() and not path.endswith(MIXTURES) and not {":", "{"} & {*path}:
        return "files"
    return _kind_of_name(path)


def _kind_of_name(path: str) -> Kind:
    """Return the kind of a source that is no ordinary file."""
    if path == LIBRARY:
        return "library"
    if path.startswith(HUB):
        return "hub"
    if is_prepared_source(path):
        return "prepared"
    if is_minari(path):
        return "minari"
    if Path(path).is_dir():
        return "folder"
    if is_remote(path):
        return "remote"
    return "pair" if parallel_files(path) else "files"


def open_source(
    path: str | None, split: str, format: str | None = None, header: Header = None
) -> Iterator[Row]:
    """Return the rows of the source `path`, read lazily.

    `format` and `header` are the user's format and column names, if any. `split` ("train", "validation" or
    "test") selects a split of a data set that has several. A column `translation` of objects
    {en: ..., de: ...}, as data sets of the hub have, becomes a column for each language.
    """
    return _with_languages(_source_rows(path, split, format, header))


def _with_languages(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        texts = row.get("translation")
        if isinstance(texts, dict):
            row = {**{name: value for name, value in row.items() if name != "translation"}, **texts}
        yield row


def _source_rows(path: str | None, split: str, format: str | None, header: Header) -> Iterator[Row]:
    if path is None:
        return ({"text": text} for text in default_documents())
    match kind_of_source(path):
        case "library":
            return ({"text": text} for text in library_documents())
        case "hub":
            return hub_rows(path, _split(path, hub_splits(path), split))
        case "minari":
            return read_minari(path)
        case "folder" | "prepared" if Path(path).is_dir():
            return _directory_rows(Path(path), split)
        case "pair":
            return read_pairs(*map(existing_file, parallel_files(path)))
        case _:
            return _file_rows(path, format, header)


def source_name(path: str | None) -> str:
    """Return the name of the source in messages."""
    return "the default text" if path is None else path


def parallel_files(path: str) -> list[str]:
    """Return the names of two parallel files "a.{b,c}"; an empty list for any other path."""
    pair = _PAIR.fullmatch(path)
    return [pair[1] + pair[2] + pair[4], pair[1] + pair[3] + pair[4]] if pair else []


def source_files(path: str) -> list[Path]:
    """Return the files of the source `path`, in order; an empty list for none, which its reader reports."""
    match kind_of_source(path):
        case "hub" | "remote":
            return []
        case "prepared":
            return prepared_files(path)
        case "library":
            return library_files()
        case "minari":
            return minari_files(path)
        case "folder":
            return sorted(file for file in Path(path).rglob("*") if file.is_file())
        case "pair":
            return [Path(name) for name in parallel_files(path) if Path(name).is_file()]
        case _:
            file = Path(path)
            return ([file] if file.is_file() else []) if file.exists() else _of_pattern(path)


def has_validation(path: str | None) -> bool:
    """Return whether the source is a data set with a validation split."""
    if path is None:
        return False
    match kind_of_source(path):
        case "prepared":
            return open_prepared(path, "validation") is not None
        case "hub":
            return bool(_chosen(hub_splits(path), "validation"))
        case "folder":
            return bool(_chosen(_directory_splits(Path(path)), "validation"))
        case _:
            return False


def are_files(name: str) -> bool:
    """Return whether the file exists, or both of two parallel files "a.{b,c}"."""
    return all(Path(file).is_file() for file in parallel_files(name) or [name])


def existing_file(name: str) -> Path:
    """Return the path of a file; raises `InputError` if it does not exist or is not a file."""
    path = Path(name)
    if path.is_file():
        return path
    if path.exists():
        raise InputError(f"{name}: expected a file, got {kind_of(path.stat())}")
    hint = f"; a data set of the hub is written {HUB}{name}" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
    raise InputError(f"{name}: no such file{hint}")


def matching(path: str) -> list[Path | Remote]:
    """Return the local or remote files that match a name or pattern; raises `InputError` for none."""
    if is_remote(path):
        remote = remote_files(path)
        if not remote:
            raise InputError(f"{path}: no such file")
        return [*remote]
    files = [] if Path(path).exists() else _of_pattern(path)
    for file in files:
        if leaves_folder(_fixed_folder(path), file):
            raise InputError(
                f"{file} is a link to a file outside of the folder of the pattern; name that file"
            )
    return [*files] or [existing_file(path)]


def _of_pattern(pattern: str) -> list[Path]:
    """Return the files that a pattern matches, without READMEs, licences and the like among other files."""
    files = [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()]
    return [path for path in files if not is_stray(path)] or files


def _fixed_folder(pattern: str) -> Path:
    """Return the folder in front of the first part of a pattern with wildcards."""
    return next(folder for folder in Path(pattern).parents if not glob.has_magic(str(folder)))


def _file_rows(path: str, format: str | None, header: Header) -> Iterator[Row]:
    for file in matching(path):
        kind = format_of(file, format)
        if header is not None and kind not in TABLES:
            raise InputError(f"header: {file} is read as {kind}; only {', '.join(TABLES)} take a header")
        if isinstance(file, Remote) and kind in LOCAL:
            raise InputError(f"{file}: {kind} is read from files of this machine only; fetch it")
        yield from READERS[kind](cast(Path, file), header)


def _chosen(splits: Iterable[str], wanted: str) -> str | None:
    return next((name for name in SPLITS[wanted] if name in splits), None)


def _split(path: object, splits: list[str], wanted: str) -> str:
    name = _chosen(splits, wanted)
    if name is None:
        raise InputError(f"{path}: no {wanted} split; it has {', '.join(splits) or 'none'}")
    return name


def is_source(path: Path) -> bool:
    """Return whether a directory is a source: a saved data set, or folders of texts or images."""
    try:
        _directory_splits(path)
    except InputError:
        return False
    return True


def _directory_splits(path: Path) -> list[str]:
    """Return the splits of a saved data set or of folders; an empty list for a data set without splits."""
    if is_saved(path):
        return saved_splits(path)
    if label_folders(path) or has_images(path):
        return []
    names = [name for names in SPLITS.values() for name in names if (path / name).is_dir()]
    splits = [name for name in names if label_folders(path / name) or has_images(path / name)]
    if not splits:
        raise InputError(
            f"{path}: a directory, but neither one written by save_to_disk nor one with a folder of texts or "
            f"images per label; for the files in it give a pattern, such as {path}/*.txt"
        )
    return splits


def _directory_rows(path: Path, split: str) -> Iterator[Row]:
    splits = _directory_splits(path)
    folder = path / _split(path, splits, split) if splits else path
    return saved_rows(folder, path) if is_saved(path) else folder_rows(folder, path)
