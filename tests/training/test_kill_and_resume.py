"""A killed run, resumed, ends with the same bytes as one that was never stopped: real processes, SIGKILL."""

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, run
from torch import nn

from forking import processes
from polyformer.training.task import Batch

STEPS = 24
OPTIONS: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 4, "evaluate_every": 6, "accumulate": 2}


class Counting(TinyTask):
    """Tells `event` of every batch and every loss."""

    def __init__(self, event: Callable[[], None]) -> None:
        super().__init__()
        self.event = event

    def weight(self, batch: Batch) -> int:
        self.event()
        return super().weight(batch)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.event()
        return super().loss(model, batch)


def child(out: Path, die_at: int) -> None:
    """Train, and kill this process at event `die_at`: an event is a batch, a loss, a touch of a file."""
    left = die_at

    def event() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(name: str, arguments: tuple[object, ...]) -> None:
        if arguments and isinstance(arguments[0], str | os.PathLike) and str(out) in os.fspath(arguments[0]):
            event()

    torch.set_num_threads(1)
    sys.addaudithook(audit)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        run(out, task=Counting(event), resume=True, background=bool(die_at % 2), **OPTIONS)


def attempt(out: Path, die_at: int, wait: float | None = None) -> int:
    """Run the child, killing it from outside after `wait` seconds if it has not ended; its exit code."""
    process = processes.Process(target=child, args=(out, die_at))
    process.start()
    process.join(wait)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode


def contents(out: Path) -> dict[str, Any]:
    """Every file of a run, as bytes; of the metrics what is not a time."""
    files: dict[str, Any] = {
        path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }
    rows = [json.loads(line) for line in files.pop("metrics.jsonl").splitlines()]
    assert len(files.pop("metrics.csv").splitlines()) == len(rows) + 1
    clocks = ("seconds", "tokens_per_s")
    files["metrics"] = [{name: value for name, value in row.items() if name not in clocks} for row in rows]
    return files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run that nobody stops leaves."""
    out = tmp_path_factory.mktemp("whole")
    assert attempt(out, die_at=0) == 0
    files = contents(out)
    assert f"checkpoints/step-{STEPS:08d}/optimizer.safetensors" in files
    assert [row["step"] for row in files["metrics"]] == list(range(3, STEPS + 1, 3))
    return files


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_events(tmp_path: Path, whole: dict[str, Any], seed: int) -> None:
    """Also in the middle of writing a checkpoint: about half of the events are touches of its files."""
    draw = random.Random(seed)
    kills = 0
    while attempt(tmp_path, die_at=draw.randint(1, 120) if kills < 12 else 0):
        kills += 1
    assert kills >= 3
    assert contents(tmp_path) == whole


def test_killed_at_every_event_around_a_checkpoint(tmp_path: Path, whole: dict[str, Any]) -> None:
    """Each attempt dies a little later than the one before: the moments of a checkpoint have their turn."""
    die_at = 30
    while attempt(tmp_path, die_at):
        die_at += 2
    assert contents(tmp_path) == whole
    assert die_at >= 60


def test_killed_from_outside_whenever(tmp_path: Path, whole: dict[str, Any]) -> None:
    draw = random.Random(0)
    for _ in range(12):
        attempt(tmp_path, die_at=0, wait=draw.uniform(0.01, 0.15))
    assert attempt(tmp_path, die_at=0) == 0
    assert contents(tmp_path) == whole
