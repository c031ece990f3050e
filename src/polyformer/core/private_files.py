"""Folders that only this user can write, and files that prove to have been written by this user.

A file that can run code, such as compiled code, is read only with the signature of a key that no other user
can read. So neither a file that another user puts into a shared cache folder is run, nor one that comes with
an archive or a copied folder.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from polyformer.core.files import atomic_write, open_file
from polyformer.core.paths import state_folder

SIGNATURE = hashlib.sha256().digest_size
"""The bytes before the content of a signed file."""

_KEY = "key"
_OTHERS_WRITE, _OTHERS = stat.S_IWGRP | stat.S_IWOTH, stat.S_IRWXG | stat.S_IRWXO


class SharedError(Exception):
    """A file or folder is not this user's, or others can change it; the message has the way out."""


def private_folder(path: Path) -> Path:
    """Return the folder `path`, created for this user only if it does not exist.

    Raises `SharedError` if it belongs to another user, or others can write to it.
    """
    path.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    _check(path, path.stat(), _OTHERS_WRITE)
    return path


def write_signed(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file by `write(path)`, atomically and with a signature, into a private folder.

    Raises `SharedError` if others can change the folder or read the key, and `InputError` as `atomic_write`.
    """

    def signed(partial: Path) -> None:
        write(partial)
        content = partial.read_bytes()
        partial.write_bytes(_signature(path, content) + content)
        partial.chmod(stat.S_IRUSR | stat.S_IWUSR)

    private_folder(path.parent)
    atomic_write(path, signed)


def read_signed(path: Path) -> bytes | None:
    """Return the content of a file by `write_signed`; None for a missing, damaged, renamed or foreign file.

    Raises `SharedError` if others can change the file or its folder, or read the key.
    """
    private_folder(path.parent)
    if not path.is_file():
        return None
    with open_file(path) as file:
        _check(path, os.fstat(file.fileno()), _OTHERS_WRITE)
        signature, content = file.read(SIGNATURE), file.read()
    return content if hmac.compare_digest(signature, _signature(path, content)) else None


def _signature(path: Path, content: bytes) -> bytes:
    """Return the signature of a file's name and content."""
    return hmac.digest(_key(), path.name.encode() + b"\0" + content, "sha256")


def _key() -> bytes:
    """Return the key of this user, which is generated at first use."""
    path = private_folder(state_folder()) / _KEY
    try:
        return _read_key(path)
    except FileNotFoundError:
        new = path.with_name(f".{_KEY}.{secrets.token_hex(4)}.partial")
        with open(
            new, "xb", opener=lambda name, flags: os.open(name, flags, stat.S_IRUSR | stat.S_IWUSR)
        ) as file:
            file.write(secrets.token_bytes(SIGNATURE))
        try:
            os.link(new, path)  # complete at once, and never in the place of another process's key
        except FileExistsError:
            pass
        finally:
            new.unlink()
        return _read_key(path)


def _read_key(path: Path) -> bytes:
    with open_file(path) as file:
        _check(path, os.fstat(file.fileno()), _OTHERS)
        key = file.read()
    if len(key) != SIGNATURE:
        raise SharedError(f"{path}: damaged; remove it")
    return key


def _check(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raise `SharedError` if a file or folder is of another user, or has `forbidden` bits of its mode."""
    if status.st_uid != os.getuid():
        raise SharedError(f"{path} belongs to another user; remove it")
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode & ~forbidden)
        raise SharedError(
            f"{path} is open to other users; remove what they put there, then chmod {mode:o} it"
        )
