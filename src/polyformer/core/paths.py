"""File names from users, refused before use if no file system can have them, and the user's own folders."""

import errno
import os
from pathlib import Path

import platformdirs

from polyformer.core.errors import InputError, quote


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
