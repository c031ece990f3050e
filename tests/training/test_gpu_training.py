"""Runs on a GPU as a user starts them: mixed precision, compiled steps, optimizers, a kill, torchrun.

Without a GPU only the run by torchrun is tested: killed runs on a CPU have their own tests.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml

from tiny_recipes import TEXT, tiny_recipe

GPU = torch.cuda.is_available()
STEPS = 40
RUNS: dict[str, dict[str, object]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "compiled": {"precision": "bf16", "compile": True},
    "recomputed": {"precision": "bf16", "recompute": True},
}
COMMAND = [sys.executable, "-m", "polyformer", "train"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "1",
    "-m",
    "polyformer",
    "train",
]


def recipe(folder: Path, optimizer: str = "adamw", engine: Mapping[str, object] = {}) -> Path:
    """A recipe of `STEPS` steps on the device at hand."""
    text = folder / "text.txt"
    text.write_text(TEXT * 20)
    own = tiny_recipe(
        text,
        STEPS,
        model={"hidden_size": 64, "dropout": 0.1},
        optimizer={"kind": optimizer},
        training={"saving": {"checkpoint_every": 5}, "reporting": {"log_every": 1}},
    )
    data = own.to_dict()
    data["training"]["engine"] |= {"device": "cuda", **engine} if GPU else {}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def losses(out: Path) -> list[float]:
    return [
        row["loss"]
        for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if "loss" in row
    ]


@pytest.mark.skipif(not GPU, reason="mixed precision and compiled steps of a CUDA device")
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_goes_on_and_learns(name: str, tmp_path: Path) -> None:
    words = [*COMMAND, str(recipe(tmp_path, engine=RUNS[name]))]
    subprocess.run([*words, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    killed = tmp_path / "killed"
    process = subprocess.Popen([*words, "--out", str(killed)], stdout=subprocess.DEVNULL)
    while process.poll() is None and not (killed / "checkpoints" / "step-00000010").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([*COMMAND, "--resume", str(killed)], check=True, capture_output=True)
    whole, resumed = losses(tmp_path / "whole"), losses(killed)
    assert len(whole) == len(resumed)
    assert whole[-1] < 0.9 * whole[0]
    assert resumed[-1] == pytest.approx(whole[-1], rel=0.02)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "sgd"] if GPU else [])
def test_other_optimizers_learn(optimizer: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    subprocess.run(
        [*COMMAND, str(recipe(tmp_path, optimizer)), "--out", str(out)], check=True, capture_output=True
    )
    assert losses(out)[-1] < losses(out)[0]


def test_torchrun_with_one_process(tmp_path: Path) -> None:
    """NCCL on a GPU, Gloo on a CPU."""
    out = tmp_path / "run"
    subprocess.run([*TORCHRUN, str(recipe(tmp_path)), "--out", str(out)], check=True, capture_output=True)
    assert losses(out)[-1] < 0.9 * losses(out)[0]
