"""Signed files of this user: what others could have written is refused or counts as missing."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from polyformer.core.ops.compiled_code import SharedError, private_folder, read_signed, write_signed


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A signed file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "folder" / "a.bin"
    write_signed(path, lambda partial: partial.write_bytes(b"content"))
    return path


def key(file: Path) -> Path:
    """The file of the key that signed the file."""
    return file.parents[1] / "state" / "polyformer" / "key"


def test_a_signed_file_is_read_and_only_its_user_can_read_it(file: Path):
    assert read_signed(file) == b"content"
    for path in (file, key(file)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    write_signed(file, lambda partial: partial.write_bytes(b"changed"))
    assert read_signed(file) == b"changed"
    assert [path.name for path in file.parent.iterdir()] == ["a.bin"]
    assert [path.name for path in key(file).parent.iterdir()] == ["key"]


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(b"\x80\x04 a pickle without a signature, longer than a signature"),
        lambda file: file.write_bytes(file.read_bytes()[:-1] + b"T"),
        lambda file: file.write_bytes(file.read_bytes()[:9]),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
        lambda file: file.rename(file.with_name("c.bin")),
        lambda file: key(file).unlink(),
    ],
    ids=["unsigned", "changed", "short", "empty", "missing", "renamed", "another user's key"],
)
def test_any_other_file_counts_as_missing(file: Path, change: Callable[[Path], object]):
    change(file)
    for path in file.parent.iterdir():
        assert read_signed(path) is None
    assert read_signed(file) is None


def test_a_signature_is_of_the_name_too(file: Path):
    other = file.with_name("b.bin")
    write_signed(other, lambda partial: partial.write_bytes(b"other"))
    other.replace(file)
    assert read_signed(file) is None


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        (lambda file: file.parent, 0o777),
        (lambda file: file.parent, 0o770),
        (lambda file: file, 0o620),
        (lambda file: file, 0o606),
        (lambda file: key(file), 0o640),
        (lambda file: key(file).parent, 0o703),
    ],
)
def test_a_file_open_to_other_users_is_refused(file: Path, place: Callable[[Path], Path], mode: int):
    place(file).chmod(mode)
    with pytest.raises(SharedError, match=r"is open to other users; .* chmod [67][0-7]{2} it"):
        read_signed(file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", [lambda file: file.parent, lambda file: file, lambda file: key(file)])
def test_a_file_of_another_user_is_refused(file: Path, place: Callable[[Path], Path]):
    os.chown(place(file), 12345, -1)
    with pytest.raises(SharedError, match="belongs to another user"):
        read_signed(file)


def test_nothing_is_written_where_others_can_change_it(file: Path):
    file.parent.chmod(0o777)
    with pytest.raises(SharedError, match="is open to other users"):
        write_signed(file, lambda partial: partial.write_bytes(b"changed"))
    file.parent.chmod(0o755)  # others may read
    assert read_signed(file) == b"content"


def test_a_damaged_key_is_named(file: Path):
    key(file).write_bytes(b"short")
    with pytest.raises(SharedError, match="key: damaged; remove it"):
        read_signed(file)


def test_a_private_folder_is_for_its_user(tmp_path: Path):
    folder = private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder(folder) == folder
