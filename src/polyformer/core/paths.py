"""Paths from users: names of files and folders that are read, and places where output goes.

A name that no file system can have is refused before use. Output goes to files and links to them, devices,
FIFOs, standard output and folders.
"""

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

import platformdirs

from polyformer.core.errors import InputError, quote, unknown


def checked_path(name: str | Path) -> Path:
    """Return the path `name` of a file or folder that exists or could exist.

    Raises `InputError` for a value that is not a name, and for a name that the operating system refuses: a
    name that is too long, or contains a NUL or half of a surrogate pair.
    """
    try:
        os.stat(name)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"expected the name of a file or folder, got {quote(name)}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{quote(str(name))}: no such file or folder, its name is too long") from None
    if not isinstance(name, str | os.PathLike):  # the number of an open file
        raise InputError(f"expected the name of a file or folder, got {quote(name)}")
    return Path(name)


def leaves_folder(folder: Path, path: Path) -> bool:
    """Return whether `path`, after all links, is outside of `folder`.

    In the cache of the hub, where the files of a snapshot are links to ../../blobs, the folder is the whole
    repository.
    """
    home = folder.resolve()
    snapshots = [place for place in (home, *home.parents) if place.parent.name == "snapshots"]
    home = snapshots[-1].parent.parent if snapshots else home
    return not path.resolve().is_relative_to(home)


def links_out_of(folder: Path) -> list[Path]:
    """Return the links in `folder` to files and folders outside of it, sorted."""
    links = (path for path in folder.iterdir() if path.is_symlink()) if folder.is_dir() else ()
    return sorted(link for link in links if leaves_folder(folder, link))


def refuse_links(folder: str | Path) -> None:
    """Raise `InputError` if a file of a model, tokenizer or store in `folder` is a link out of the folder.

    Somebody else may have made the folder, and a private file behind a link would be read in place of a
    vocabulary. Links into the cache of the hub, and a link to the whole folder, are followed.
    """
    for link in links_out_of(Path(folder)):
        if link.is_file() and not _is_of_hub(link.resolve()):
            raise InputError(
                f"{link} is a link to a file outside of its folder; put the file itself there, or link the "
                "whole folder"
            )


def _is_of_hub(file: Path) -> bool:
    """Return whether `file` is the content of a file in the cache of the hub, which older versions linked."""
    kind, _, name = file.parent.parent.name.partition("--")
    return file.parent.name == "blobs" and kind in ("models", "datasets", "spaces") and bool(name)


def cache_folder() -> Path:
    """Return the folder of this library's files that can be made again; `RuntimeError` without a home."""
    return Path(platformdirs.user_cache_dir("polyformer", appauthor=False))


def state_folder() -> Path:
    """Return the folder of this library's files that belong to this user and machine."""
    return Path(platformdirs.user_state_dir("polyformer", appauthor=False))


LINKS = 40
"""The most links that Linux follows from one name."""

TYPES = {
    stat.S_IFREG: "a file",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


def kind_of(status: os.stat_result) -> str:
    """Return the type of a path, in words."""
    return TYPES[stat.S_IFMT(status.st_mode)]


def check_format(path: str, formats: Collection[str], name: str) -> None:
    """Raise `InputError` unless `path`, the value of the option `name`, ends with one of `formats`."""
    ending = Path(path).suffix
    if ending.lower() not in formats:
        raise unknown(f"format of {name} {quote(path)}", ending, formats)


def check_file(path: str | Path, name: str = "path") -> None:
    """Raise `InputError` if `path`, the argument `name`, is a directory instead of a file."""
    if Path(path).is_dir():
        raise InputError(f"{name}: expected a file, got the directory {quote(str(path))}; name a file in it")


def check_folder(path: str | Path, name: str = "path") -> None:
    """Raise `InputError` if `path`, the argument `name`, exists and is not a folder."""
    path = Path(path)
    if os.path.lexists(path) and not path.is_dir():
        kind = kind_of(path.stat()) if path.exists() else "a link to nothing"
        raise InputError(
            f"{name}: expected a folder, or the name of a new one, got {quote(str(path))}, which is {kind}"
        )


def is_replaceable(path: Path) -> bool:
    """Return whether a new file may replace `path`: a regular file, a link to one, or nothing."""
    try:
        return descriptor(path) is None and stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def descriptor(path: str | Path) -> int | None:
    """Return the number of the open file of this process that `path` names, as /dev/stdout does; else None.

    Such a name must not be opened again, which would truncate a file to which the shell appends.
    """
    open_files = {os.path.realpath(name) for name in ("/proc/self/fd", "/dev/fd")}
    place = os.fspath(path)
    for _ in range(LINKS):
        folder, name = os.path.split(place)
        folder = os.path.realpath(folder)
        if folder in open_files and name.isdecimal():
            return int(name)
        place = os.path.join(folder, name)
        if not os.path.islink(place):
            return None
        place = os.path.join(folder, os.readlink(place))
    return None
