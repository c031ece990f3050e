"""Output destinations named by users: files and links to them, devices, FIFOs, standard output, folders."""

import os
import stat
from collections.abc import Collection
from pathlib import Path

from polyformer.core.errors import InputError, quote, unknown

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
