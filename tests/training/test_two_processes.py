"""Two processes compute what one does: losses, gradients, weights. Real processes, gloo on the CPU."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, run
from torch import nn

from launching import torchrun
from polyformer.core.files import read_tensors
from polyformer.training.metrics import read_metrics
from polyformer.training.run_control import Interrupted
from polyformer.training.task import Batch

# Plain gradient descent: the weights show the gradients. Ragged batches, one without a label;
# the end of an epoch leaves one process with fewer batches than the other, or with none.
OPTIONS: dict[str, Any] = {
    "dropout": 0.0,
    "dtype": torch.float64,
    "optimizer": "sgd",
    "lr": 0.5,
    "checkpoint_every": 3,
    "keep": 9,
    "log_every": 1,
    "evaluate_every": 6,
}


def task() -> TinyTask:
    return TinyTask(batches=7, empty=2)


def both_processes(out: Path) -> None:
    """What each of the two runs."""
    torch.set_num_threads(1)
    run(out / "two", task=task(), accumulate=2, steps=7, **OPTIONS)
    run(out / "wide", task=TinyTask(batches=5), steps=6, **OPTIONS)  # the fifth is for one alone
    run(out / "moved", task=task(), accumulate=2, steps=3, **OPTIONS)
    with pytest.raises(Interrupted) as caught:
        run(out / "stopped", task=Signalled(), accumulate=2, steps=7, **{**OPTIONS, "log_every": 3})
    (out / f"stopped-{os.environ['RANK']}").write_text(str(caught.value))


class Signalled(TinyTask):
    """The second process alone gets a SIGTERM, in its first step."""

    def __init__(self) -> None:
        super().__init__(batches=7, empty=2)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        return super().loss(model, batch)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two processes left their runs."""
    out = tmp_path_factory.mktemp("launched")
    ended = torchrun(__file__, out)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("step 7/7") == 1  # one process alone speaks
    return out


def assert_same_run(first_run: Path, second_run: Path) -> None:
    first, second = read_metrics(first_run), read_metrics(second_run)
    assert len(first) == len(second) > 0
    for row, other in zip(first, second):
        assert row.keys() == other.keys()
        for name in row.keys() - {"seconds", "tokens_per_s"}:
            assert row[name] == pytest.approx(other[name], rel=0, abs=1e-10), (row["step"], name)
    checkpoints = sorted((first_run / "checkpoints").iterdir())
    assert checkpoints
    for path in checkpoints:
        tensors = read_tensors(path / "model.safetensors")
        for name, value in read_tensors(second_run / "checkpoints" / path.name / "model.safetensors").items():
            # `calls` counts the batches of a process, not of a run.
            if name != "calls":
                assert torch.allclose(tensors[name], value, rtol=0, atol=1e-10), (path.name, name)


def test_two_processes_are_one(launched: Path, tmp_path: Path) -> None:
    run(tmp_path, task=task(), accumulate=4, steps=7, **OPTIONS)
    assert_same_run(tmp_path, launched / "two")


def test_an_epoch_that_does_not_divide(launched: Path, tmp_path: Path) -> None:
    run(tmp_path, task=TinyTask(batches=5), accumulate=2, steps=6, **OPTIONS)
    assert_same_run(tmp_path, launched / "wide")


def test_one_process_goes_on_where_two_left(launched: Path, tmp_path: Path) -> None:
    run(tmp_path, task=task(), accumulate=4, steps=3, **OPTIONS)
    for out in (tmp_path, launched / "moved"):
        run(out, task=task(), accumulate=4, steps=7, resume=True, **OPTIONS)
    assert_same_run(tmp_path, launched / "moved")


def test_a_signal_to_one_stops_both_at_the_next_row(launched: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        said = (launched / f"stopped-{rank}").read_text()
        assert said == "stopped by SIGTERM at step 3, of which a checkpoint is written"
    options = {**OPTIONS, "log_every": 3}
    run(launched / "stopped", task=task(), accumulate=4, steps=7, resume=True, **options)
    run(tmp_path, task=task(), accumulate=4, steps=7, **options)
    assert_same_run(tmp_path, launched / "stopped")


if __name__ == "__main__":
    both_processes(Path(sys.argv[1]))
