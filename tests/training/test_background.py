"""Checkpoints that are written in the background: the same files, while training goes on."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, run
from torch import nn

from polyformer.core.errors import InputError
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.run_control import Interrupted
from polyformer.training.task import Batch

KEPT: dict[str, Any] = {"background": True, "keep": 9}


class Counting(TinyTask):
    """Calls `event` with the number of every loss, which is that of the step."""

    def __init__(self, event: Any) -> None:
        super().__init__()
        self.event, self.step = event, 0

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.step += 1
        self.event(self.step)
        return super().loss(model, batch)


def contents(out: Path) -> dict[str, bytes]:
    """The files of a run's checkpoints."""
    paths = [path for path in (out / "checkpoints").rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def test_training_goes_on_and_the_checkpoint_is_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    far = threading.Event()
    plain = Checkpoints.write

    def held(self: Checkpoints, snapshot: Any) -> None:
        assert far.wait(20), "training waited for its checkpoint"
        plain(self, snapshot)

    run(tmp_path / "alone", keep=9)
    monkeypatch.setattr(Checkpoints, "write", held)
    task = Counting(lambda step: far.set() if step == 8 else None)
    run(tmp_path / "background", task=task, **KEPT)
    assert contents(tmp_path / "background") == contents(tmp_path / "alone")


def test_a_failed_background_write_is_raised_and_earlier_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = Checkpoints.write

    def full(self: Checkpoints, snapshot: Any) -> None:
        monkeypatch.setattr("polyformer.training.checkpoint.save_tensors", no_space)
        plain(self, snapshot)

    def no_space(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def late(step: int) -> None:
        if step == 7:
            monkeypatch.setattr(Checkpoints, "write", full)
        if step > 10:
            time.sleep(0.1)  # so that the error comes before the next checkpoint

    task = Counting(late)
    with pytest.raises(InputError, match=r"cannot write .*step-00000010: no space left .* is intact"):
        run(tmp_path, task=task, **KEPT)
    assert 10 < task.step < 15
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005"]
    monkeypatch.undo()
    assert run(tmp_path, resume=True, **KEPT)[1].step == 20


def test_an_interruption_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = Checkpoints.write

    def slow(self: Checkpoints, snapshot: Any) -> None:
        time.sleep(0.3)
        plain(self, snapshot)

    monkeypatch.setattr(Checkpoints, "write", slow)
    task = Counting(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 7 else None)
    with pytest.raises(Interrupted):
        run(tmp_path, task=task, **KEPT)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000005", "step-00000007"]
