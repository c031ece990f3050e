"""One writer at a time: four real processes at once, a holder that is killed, file systems without locks."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, run
from torch import nn

from forking import processes
from polyformer.core.errors import InputError
from polyformer.training.metrics import read_metrics
from polyformer.training.run_control import LOCK, MARKER, sole_writer
from polyformer.training.task import Batch

HOST = re.escape(socket.gethostname())


class Waiting(TinyTask):
    """Says that it has begun, and takes its first step when it may."""

    def __init__(self, reports: Any, may: Any) -> None:
        super().__init__()
        self.reports, self.may = reports, may

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if not self.may.is_set():
            self.reports.put(("began", os.getpid()))
            self.may.wait()
        return super().loss(model, batch)


def contender(out: Path, reports: Any, may: Any) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            run(out, resume=True, steps=12, task=Waiting(reports, may))
        except InputError as error:
            reports.put(("refused", str(error)))


def test_four_processes_at_once(tmp_path: Path) -> None:
    run(tmp_path, steps=5)
    reports, may = processes.Queue(), processes.Event()
    contenders = [processes.Process(target=contender, args=(tmp_path, reports, may)) for _ in range(4)]
    for process in contenders:
        process.start()
    said = [reports.get() for _ in contenders]
    may.set()
    for process in contenders:
        process.join()
        assert process.exitcode == 0
    (writer,) = [what for kind, what in said if kind == "began"]
    refusals = [what for kind, what in said if kind == "refused"]
    assert len(refusals) == 3
    for message in refusals:
        pattern = rf"{tmp_path}: in use by process {writer} on {HOST} \(since 20.*\); wait until it ends, or "
        assert re.match(pattern, message)
    rows = [row["step"] for row in read_metrics(tmp_path)]
    assert rows == sorted(set(rows))
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == len(rows) + 1
    assert (tmp_path / LOCK).read_bytes() == b""


def killed_holder(out: Path) -> None:
    with sole_writer(out):
        os.kill(os.getpid(), signal.SIGKILL)


def left_by_a_crash(out: Path) -> None:
    process = processes.Process(target=killed_holder, args=(out,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert json.loads((out / LOCK).read_bytes())["process"] == process.pid


def test_a_killed_holder_leaves_nothing_stale(tmp_path: Path) -> None:
    left_by_a_crash(tmp_path)
    with sole_writer(tmp_path):
        assert json.loads((tmp_path / LOCK).read_bytes())["process"] == os.getpid()


def test_a_body_that_is_refused_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    left_by_a_crash(tmp_path)
    before = (tmp_path / LOCK).read_bytes()
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(InputError, match="refused"), sole_writer(folder):
            raise InputError("refused")
    assert (tmp_path / LOCK).read_bytes() == before
    assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.parametrize("name", [LOCK, MARKER])
@pytest.mark.parametrize("kind", ["a FIFO", "a link", "a folder"])
def test_a_lock_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    file = tmp_path / "run" / name
    file.parent.mkdir()
    makers = {
        "a FIFO": os.mkfifo,
        "a link": lambda path: path.symlink_to("../target"),
        "a folder": Path.mkdir,
    }
    makers[kind](file)
    message = rf"{name}: expected a file, which is locked, got {kind}; remove it"
    with pytest.raises(InputError, match=message), sole_writer(file.parent):
        pytest.fail("the body runs")
    assert os.listdir(file.parent) == [name]
    assert (tmp_path / "target").read_bytes() == b"kept"


def test_a_folder_inside_is_no_link_to_another_place(tmp_path: Path) -> None:
    for name in ("run", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole").symlink_to("run")
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "latest").symlink_to("checkpoints")
    with sole_writer(tmp_path / "whole"):
        pass
    (tmp_path / "run" / "tensorboard").symlink_to("../elsewhere")
    message = "tensorboard is a link to a folder outside of"
    with pytest.raises(InputError, match=message), sole_writer(tmp_path / "whole"):
        pytest.fail("the body runs")


def test_other_errors_and_interruptions_release_it(tmp_path: Path) -> None:
    for kind in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(kind), sole_writer(tmp_path):
            raise kind
    message = f"in use by process {os.getpid()} on"
    with sole_writer(tmp_path), pytest.raises(InputError, match=message), sole_writer(tmp_path):
        pass


def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    with sole_writer(tmp_path):
        for text in ("", "[1]", "{"):
            (tmp_path / LOCK).write_text(text)
            with pytest.raises(InputError, match="in use by another process; wait"), sole_writer(tmp_path):
                pass


def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"), sole_writer(tmp_path / "file"):
        pass


def no_locks(handle: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with sole_writer(tmp_path):
        assert (tmp_path / MARKER).exists()
        with pytest.raises(InputError, match=rf"no longer runs, remove .*{MARKER}$"), sole_writer(tmp_path):
            pass
    assert not (tmp_path / MARKER).exists()
    process = processes.Process(target=os.getpid)  # a number that was a process
    process.start()
    process.join()
    (tmp_path / MARKER).write_text(f"{process.pid}\n{socket.gethostname()}\n")
    with sole_writer(tmp_path):
        pass
    (tmp_path / MARKER).write_text(f"{process.pid}\nanother-machine\n")
    with pytest.raises(InputError, match="in use by"), sole_writer(tmp_path):
        pass
