"""Files: complete or absent, errors that name them, and tensors written one after another."""

import errno
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from full_disk import largest_file
from polyformer.core.errors import InputError
from polyformer.core.files import (
    TYPES,
    atomic_directory,
    atomic_write,
    folder_for_files,
    in_file_order,
    open_file,
    read_json,
    read_tensors,
    remove_directory,
    remove_partials,
    tied_names,
    write_json,
    write_one_by_one,
    write_tensors,
    writing,
)


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    atomic_write(path, b"one")
    atomic_write(path, lambda partial: partial.write_text("two"))
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]


def test_atomic_write_keeps_the_old_file_when_the_writer_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"one")

    def fail(partial: Path) -> None:
        partial.write_bytes(b"tw")
        raise KeyError("stop")

    with pytest.raises(KeyError):
        atomic_write(path, fail)
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    atomic_write(tmp_path / "file", b"")
    with atomic_directory(tmp_path / "made"):
        pass
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_full_disk_keeps_the_old_file_and_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_tensors(path, {"a": torch.ones(3)})
    before = path.read_bytes()
    with largest_file(1000):
        with pytest.raises(
            InputError, match=r"cannot write .*weights.safetensors: no space left .* free some space"
        ):
            write_tensors(path, {"a": torch.zeros(1000)})
        with pytest.raises(InputError, match="no space left"):
            atomic_write(path, bytes(2000))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_full_disk_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    def write() -> None:
        with folder_for_files(tmp_path / "a/b"):
            (tmp_path / "a/b/first").write_bytes(b"x")
            atomic_write(tmp_path / "a/b/second", bytes(2000))

    with largest_file(1000), pytest.raises(InputError, match="no space left"):
        write()
    assert os.listdir(tmp_path) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old/kept").write_bytes(b"x")
    with pytest.raises(KeyboardInterrupt), folder_for_files(tmp_path / "old"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path / "old") == ["kept"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_no_space_on_the_device_itself() -> None:
    message = r"cannot write /dev/full: no space left \(No space left on device\)"
    with pytest.raises(InputError, match=message), writing("/dev/full"):
        Path("/dev/full").write_bytes(b"x")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_every_way_of_having_no_space_is_one_error(number: int) -> None:
    with pytest.raises(InputError, match="no space left"), writing("x"):
        raise OSError(number, os.strerror(number))


def test_other_refusals_to_write_say_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match=r"cannot write .*file/below: (Not a directory|File exists)"):
        atomic_write(tmp_path / "file" / "below", b"")


def test_atomic_directory_replaces_a_whole_one(tmp_path: Path) -> None:
    target = tmp_path / "run"
    for text in ("one", "two"):
        with atomic_directory(target) as folder:
            (folder / text).mkdir()
            (folder / text / "file").write_text(text)
            assert not (target / text).exists()
    assert [path.relative_to(target).as_posix() for path in sorted(target.rglob("*"))] == ["two", "two/file"]
    assert os.listdir(tmp_path) == ["run"]


def test_atomic_directory_keeps_the_old_one_on_any_error(tmp_path: Path) -> None:
    target = tmp_path / "run"
    with atomic_directory(target) as folder:
        (folder / "file").write_text("one")
    with pytest.raises(ZeroDivisionError), atomic_directory(target) as folder:
        (folder / "file").write_text(f"two {1 / 0}")
    with (
        largest_file(1000),
        pytest.raises(InputError, match="no space left"),
        atomic_directory(target) as folder,
    ):
        (folder / "file").write_bytes(bytes(2000))
    assert (target / "file").read_text() == "one"
    assert os.listdir(tmp_path) == ["run"]


def test_remove_directory_and_partials(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "run") as folder:
        (folder / "file").write_text("one")
    remove_directory(tmp_path / "run")
    (tmp_path / ".run.12345678.partial").mkdir()
    (tmp_path / ".file.12345678.partial").write_text("")
    (tmp_path / "kept").write_text("")
    remove_partials(tmp_path)
    assert os.listdir(tmp_path) == ["kept"]


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    tensors = {
        "whole": base,
        "same": base,
        "transposed": base.t(),
        "part": base[1],
        "half": torch.randn(2, 3).bfloat16(),
        "none": torch.zeros(0, 3),
        "nothing": torch.zeros(0, 2),
        "scalar": torch.tensor(7),
    }
    write_tensors(tmp_path / "t", tensors)
    read = read_tensors(tmp_path / "t")
    assert tied_names(tensors) == {"same": "whole"}
    assert read.keys() == tensors.keys() - {"same"}
    for name, tensor in tensors.items():
        if name == "same":
            continue
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_reading_a_missing_file_names_it(tmp_path: Path) -> None:
    for read in (read_tensors, read_json):
        with pytest.raises(InputError, match=r"no such file: .*absent"):
            read(tmp_path / "absent")
        with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
            read(tmp_path)


def test_every_truncation_of_a_tensor_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_tensors(path, {"a": torch.ones(5), "b": torch.zeros(2)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(
            InputError, match=r"weights.safetensors is damaged or not safetensors \(.*\); restore"
        ):
            read_tensors(path)


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "zip.bin")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.bin").write_bytes(pickle.dumps({"a": 1}))
    for name in ("zip.bin", "old.bin", "plain.bin"):
        with pytest.raises(InputError, match=rf"{name} is a pickle.* refused; convert it to safetensors"):
            read_tensors(tmp_path / name)


@pytest.mark.parametrize("size", [0x280, 0x380, 0x480, 0x580])
def test_a_header_length_that_looks_like_a_pickle_is_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights.safetensors"
    for length in range(size - 200, size):
        write_tensors(path, {"a" * length: torch.ones(2)})
        if int.from_bytes(path.read_bytes()[:8], "little") == size:
            break
    assert path.read_bytes()[0] == 0x80
    assert torch.equal(*read_tensors(path).values(), torch.ones(2))


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe\x00", b"weights"])
def test_damaged_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(InputError, match=r"state.json: not JSON .*restore"):
        read_json(tmp_path / "state.json")


def test_json_round_trip_keeps_every_bit_of_a_float(tmp_path: Path) -> None:
    data = {"x": [0.1 + 0.2, 1e-310, None, True], "y": {"z": "ä"}}
    write_json(tmp_path / "x.json", data)
    assert read_json(tmp_path / "x.json") == data


@pytest.mark.parametrize(
    ("place", "kind"), [("/dev/zero", "a device"), ("link", "a device"), ("fifo", "a FIFO")]
)
def test_only_regular_files_are_opened_to_read(place: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    writer = os.open(tmp_path / "fifo", os.O_RDWR)  # otherwise opening the FIFO could wait for ever
    with pytest.raises(InputError, match=f"expected a file, got {kind}"):
        open_file(tmp_path / place)
    os.close(writer)


def test_a_directory_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        read_json(tmp_path)


def test_the_bytes_are_the_librarys_own(tmp_path: Path):
    tensors = {
        f"{'zab'[i % 3]}.{i}": torch.arange(4 * i).view(2, -1).to(kind) for i, kind in enumerate(TYPES)
    }
    tensors |= {name: torch.randn(3, 5).bfloat16() for name in ("É", 'a "quoted" \\ name', "")}
    tensors |= {"scalar": torch.tensor(7), "none": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    like = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_one_by_one(tmp_path / "ours", like, (tensors[name] for name in in_file_order(like)))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_one_tensor_is_asked_for_after_the_other_is_written(tmp_path: Path):
    like = {name: torch.zeros(1 << 18) for name in "abc"}
    seen = []

    def numbers():
        for name in in_file_order(like):
            seen.append((tmp_path / "file").stat().st_size >> 20)
            yield like[name]

    write_one_by_one(tmp_path / "file", like, numbers())
    assert seen == [0, 1, 2]


def test_a_type_without_a_name_is_refused_before_anything_is_written(tmp_path: Path):
    like = {"weight": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(
        InputError, match=r"'weight' is of torch.complex128, for which safetensors has no name"
    ):
        write_one_by_one(tmp_path / "file", like, like.values())
    assert not (tmp_path / "file").exists()
