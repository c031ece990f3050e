"""Two processes that share the rows of a model with a memory compute what one does. Real processes, gloo."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_two_processes import assert_same_run
from tiny_task import settings
from torch import Tensor, nn

from launching import torchrun
from polyformer.core.files import read_tensors
from polyformer.core.state import State
from polyformer.data import Splits
from polyformer.models.architectures import build_model
from polyformer.training.loop import train
from polyformer.training.optimizers import OptimizerConfig, ScheduleConfig
from polyformer.training.task import Batch
from polyformer.training.tasks import TaskWithData
from tiny_recipes import tiny_recipe

# 163 tokens: in two rows the last segment of an epoch is a column that has a label in the first alone.
TEXTS = [{"text": "a " * length + "."} for length in (5, 12, 20, 9, 28)]
STEPS, LEFT, KILLED = 14, 7, 11
MEMORIES: dict[str, dict[str, Any]] = {
    "recurrent": {"rows": 2, "memory": "recurrent(length=24)"},
    "compressive": {
        "rows": 4,
        "memory": "compressive(length=8, compressed_length=6, rate=2, compression=mean)",
    },
    "dropout": {"rows": 2, "memory": "recurrent(length=24)", "dropout": 0.1},
}


class Killed(TaskWithData):
    """The second process alone gets a SIGKILL before a step."""

    steps = 0

    def loss_after(self, model: nn.Module, batch: Batch, state: State | None) -> tuple[Tensor, State | None]:
        self.steps += 1
        if self.steps == KILLED and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGKILL)
        return super().loss_after(model, batch, state)


def run(
    out: Path, case: str, kind: type[TaskWithData] = TaskWithData, steps: int = STEPS, resume: bool = False
) -> None:
    options = dict(MEMORIES[case])
    task = {"feed": "in_order", "batch_tokens": 16 * options.pop("rows"), "ngram_order": 0}
    model = {"position": "transformer_xl", "dropout": 0.0, **options}
    recipe = tiny_recipe(Path("unread"), task=task, model=model)
    task = recipe.task.build(recipe.task.tokenizer(recipe.tokenizer, TEXTS))
    torch.manual_seed(1)
    network = build_model(task.adapt(recipe.model_config())).double()
    fitting = kind(task, Splits(TEXTS, TEXTS[:3], None), 0)
    often = {"checkpoint_every": 4, "keep": 9, "log_every": 1, "evaluate_every": 7}
    chosen = {"kind": "adamw", "lr": 0.01} if case == "dropout" else {"kind": "sgd", "lr": 0.2}
    optimizer = OptimizerConfig.from_dict(chosen)
    schedule = ScheduleConfig.from_dict({"kind": "constant"})
    config = settings(steps=steps, **often)
    train(network, fitting, config, optimizer, schedule, out / case, seed=3, resume=resume)


def launched(out: Path, part: str) -> subprocess.CompletedProcess[str]:
    """Two processes that run `part` below."""
    return torchrun(__file__, out, part, timeout=200)


def parts(out: Path, part: str) -> None:
    """What each of the two runs."""
    torch.set_num_threads(1)
    if part == "first":
        for case in MEMORIES:
            run(out / "two", case)
        run(out / "left", "recurrent", steps=LEFT)
        run(out / "killed", "dropout", kind=Killed)
    else:
        run(out / "killed", "dropout", resume=True)
        run(out / "begun", "recurrent", resume=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two processes, killed once, left their runs."""
    out = tmp_path_factory.mktemp("launched")
    run(out / "begun", "recurrent", steps=LEFT)
    first = launched(out, "first")
    assert "process 1 ended with status -9" in first.stderr, first.stderr[-3000:]
    second = launched(out, "second")
    assert second.returncode == 0, second.stderr[-3000:]
    return out


@pytest.mark.parametrize("case", ["recurrent", "compressive"])
def test_two_processes_are_one(runs: Path, tmp_path: Path, case: str) -> None:
    run(tmp_path, case)
    assert_same_run(tmp_path / case, runs / "two" / case)
    memories = [
        at / case / f"checkpoints/step-{STEPS:08d}/memory.safetensors" for at in (tmp_path, runs / "two")
    ]
    mine, theirs = map(read_tensors, memories)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.allclose(tensor.double(), theirs[name].double(), rtol=0, atol=1e-10), name


def test_a_killed_run_goes_on_bit_for_bit(runs: Path) -> None:
    folders = [runs / at / "dropout" / f"checkpoints/step-{STEPS:08d}" for at in ("two", "killed")]
    for name in ("model", "memory", "optimizer"):
        first, second = ((folder / f"{name}.safetensors").read_bytes() for folder in folders)
        assert first == second


def test_another_number_of_processes_goes_on(runs: Path, tmp_path: Path) -> None:
    run(tmp_path, "recurrent")
    assert_same_run(tmp_path / "recurrent", runs / "begun" / "recurrent")
    shutil.copytree(runs / "left", tmp_path / "left")
    run(tmp_path / "left", "recurrent", resume=True)
    assert_same_run(tmp_path / "recurrent", tmp_path / "left" / "recurrent")


if __name__ == "__main__":
    parts(Path(sys.argv[1]), sys.argv[2])
