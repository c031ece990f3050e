"""How many threads a run computes with, and that another machine is reported."""

from pathlib import Path

import pytest
import torch
from tiny_task import TinyTask, run
from torch import nn

from polyformer.training.task import Batch


class Counting(TinyTask):
    """Notes with how many threads each loss is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        return super().loss(model, batch)


def test_a_tiny_model_is_trained_by_one_thread(tmp_path: Path):
    task = Counting()
    torch.set_num_threads(2)
    run(tmp_path, task=task, steps=2)
    assert task.threads == [1, 1]
    assert torch.get_num_threads() == 2


def test_a_resumed_run_computes_with_the_threads_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Counting()
    run(tmp_path, task=task, steps=2, threads=2)
    assert torch.get_num_threads() == 1
    capsys.readouterr()
    run(tmp_path, task=task, steps=4, resume=True)
    assert "2 threads, as the run began; --training.engine.threads N for others\n" in capsys.readouterr().out
    run(tmp_path, task=task, steps=6, resume=True, threads=1)
    assert task.threads == [2, 2, 2, 2, 1, 1]
    message = "threads 2, now 1: the last bits may differ from an uninterrupted run's\n"
    assert message in capsys.readouterr().out
    run(tmp_path, task=task, steps=8, resume=True)
    assert "threads" not in capsys.readouterr().out


def test_another_machine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    run(tmp_path, steps=2)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OLDER")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    monkeypatch.setattr(torch, "__version__", "99.1.0")
    capsys.readouterr()
    run(tmp_path, steps=4, resume=True)
    out = capsys.readouterr().out
    assert ", now OLDER; onednn default, now SSE41; torch " in out
    assert ", now 99.1.0: the last bits may differ" in out
