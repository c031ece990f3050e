"""The threads, the precision and the random numbers of a run, and that another machine is reported."""

import random
from pathlib import Path

import numpy
import pytest
import torch
from tiny_task import TinyModel, TinyTask, run
from torch import nn

from polyformer.training.config import EngineConfig
from polyformer.training.engine import Engine, seed_step
from polyformer.training.machine import choose_precision, tensor_float32
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


@pytest.mark.parametrize(
    ("precision", "device", "supported", "expected"),
    [
        ("auto", "cpu", True, "no"),
        ("auto", "cuda", True, "bf16"),
        ("auto", "cuda", False, "no"),
        ("no", "cuda", True, "no"),
        ("fp16", "cuda", True, "fp16"),
    ],
)
def test_the_precision_is_chosen_by_the_device(
    precision: str, device: str, supported: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert choose_precision(precision, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("precision", "before", "inside"),
    [("bf16", "highest", "high"), ("bf16", "medium", "medium"), ("no", "highest", "highest")],
)
def test_products_in_float32_are_rounded_only_in_a_run_that_rounds(
    precision: str, before: str, inside: str
) -> None:
    usual = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(before)
        with tensor_float32(precision, torch.device("cuda")):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(usual)


@pytest.mark.parametrize(("needed", "expected"), [(True, "no"), (False, "bf16")])
def test_a_task_may_need_float32_by_default(needed: bool, expected: str) -> None:
    class Exact(TinyTask):
        needs_float32 = needed

    engine = Engine(EngineConfig(device="cpu"))
    engine.precision = "bf16"  # as on a GPU
    engine.place_model(TinyModel(0.0, torch.float32), Exact())
    assert engine.precision == expected


def draws(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank, torch.device("cpu"))
    return torch.rand(()).item(), float(numpy.random.rand()), random.random()


def test_the_same_place_draws_the_same() -> None:
    first = draws(3, 17, 0)
    draws(3, 18, 0)
    torch.rand(5)
    assert draws(3, 17, 0) == first


def test_every_other_place_draws_something_else() -> None:
    places = [(seed, step, rank) for seed in (0, 1, 12) for step in (1, 2, 21) for rank in (0, 1)]
    seen = [draws(*place) for place in places]
    for source in zip(*seen):
        assert len(set(source)) == len(places)
