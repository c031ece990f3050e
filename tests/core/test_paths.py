"""Names that no file can have, wherever a folder is named, and the places where output goes."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyformer
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_directory, atomic_write, write_output
from polyformer.core.paths import check_folder, descriptor
from polyformer.data import load_tokenizer
from polyformer.training.recipes.run import Run, is_checkpoint

CONTENTS = [b"new", lambda file: file.write_bytes(b"new")]
contents = pytest.mark.parametrize("content", CONTENTS, ids=["bytes", "writer"])


@contents
@pytest.mark.parametrize("before", [b"old", None], ids=["a target", "no target"])
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, content, before: bytes | None) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    if before is not None:
        target.write_bytes(before)
    (tmp_path / "second").symlink_to("elsewhere/target")
    link.symlink_to("second")
    write_output(link, content)
    assert os.readlink(link) == "second"
    assert not target.is_symlink()
    assert target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["target"]


def test_a_link_inside_a_folder_of_the_library_is_replaced(tmp_path: Path) -> None:
    """A run that somebody else made must not write outside of its folder."""
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    atomic_write(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"old"
    assert not (tmp_path / "link").is_symlink()


@contents
def test_a_fifo_is_written_into(tmp_path: Path, content) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()), daemon=True)
    reader.start()
    write_output(fifo, content)
    reader.join(10)
    assert got == [b"new"]
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


def test_the_reader_of_a_fifo_may_leave(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    threading.Timer(0.2, os.close, [reader]).start()
    with pytest.raises(BrokenPipeError):
        write_output(tmp_path / "fifo", bytes(10**6))


@contents
def test_an_open_file_is_written_at_its_position(tmp_path: Path, content) -> None:
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as file:
        file.write(b"before, ")
        write_output(f"/dev/fd/{file.fileno()}", content)
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_output(tmp_path / "link", b", after")
    assert log.read_bytes() == b"before, new, after"


def test_names_of_open_files(tmp_path: Path) -> None:
    (tmp_path / "out.svg").symlink_to("/dev/stdout")
    assert descriptor(tmp_path / "out.svg") == descriptor("/dev/stdout") == descriptor("/dev/fd/1") == 1
    assert descriptor("/dev/stderr") == 2
    assert descriptor(tmp_path / "1") is descriptor("/dev/null") is None


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(InputError, match=r"cannot write .*link: Too many levels of symbolic links"):
        write_output(tmp_path / "link", b"x")
    assert descriptor(tmp_path / "link") is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@contents
def test_a_full_device_is_an_error(content) -> None:
    with pytest.raises(InputError, match="cannot write /dev/full: no space left"):
        write_output("/dev/full", content)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a file, got the directory '.*'; name a file in it"):
        write_output(tmp_path, b"x")


def test_folders_are_no_files_devices_or_fifos(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "lost").symlink_to("nowhere")
    kinds = {"file": "a file", "fifo": "a FIFO", "device": "a device", "lost": "a link to nothing"}
    for name, kind in kinds.items():
        message = f"expected a folder, or the name of a new one, got '.*{name}', which is {kind}$"
        with pytest.raises(InputError, match=message):
            check_folder(tmp_path / name)
        with pytest.raises(InputError, match=message), atomic_directory(tmp_path / name):
            pytest.fail("the body runs")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == sorted(kinds)


def test_a_link_to_a_folder_is_replaced_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "link").symlink_to("old")
    with atomic_directory(tmp_path / "link") as folder:
        (folder / "file").write_bytes(b"new")
    assert sorted(os.listdir(tmp_path)) == ["link", "old"]


READERS: list[Callable[[Any], object]] = [
    polyformer.from_pretrained,
    load_tokenizer,
    Run.open,
    is_checkpoint,
    open_reader,
    lambda name: open_folder(Path(name)),
]


@pytest.mark.parametrize("read", READERS)
def test_a_name_that_is_none(read: Callable[[Any], object]):
    for name in ("x" * 5000, "x" * 300, "a\0b", "\ud800"):
        with pytest.raises(InputError, match=r"name is too long|expected the name of a file") as refused:
            read(name)
        assert len(str(refused.value)) < 400
    with pytest.raises(InputError, match="expected the name of a file or folder, got 5"):
        polyformer.from_pretrained(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["generate", "show", "evaluate", "train --data"])
def test_on_the_command_line(words: str, complaint: Callable[..., str]):
    assert "name is too long" in complaint(*words.split(), "x" * 5000)


def test_converting_into_a_file(tmp_path: Path, complaint: Callable[..., str]):
    text = tmp_path / "some.jsonl"
    text.write_text("{}")
    error = complaint("convert", tmp_path, text)
    assert f"OUT: expected a folder, or the name of a new one, got '{text}', which is a file" in error
