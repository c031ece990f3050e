"""Staged training that is stopped or killed in its second stage ends as if nothing had happened."""

import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from forking import processes
from polyformer.cli.main import main

METRICS, RECIPE, WEIGHTS = "metrics.jsonl", "recipe.yaml", "model.safetensors"


def command(out: Path, number: int, name: str) -> None:
    """`polyformer train --stages 2`, with a signal as the file `name` of the second stage is opened."""
    left = [number] if number else []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if event == "open" else ""
        appended = name != METRICS or arguments[1:2] == ("a",)  # a row, within the loop that heeds signals
        if left and "stage-2" in path and "step-" not in path and name in path and appended:
            os.kill(os.getpid(), left.pop())

    sys.addaudithook(audit)
    torch.set_num_threads(1)
    words = f"""--model longformer-decoder-small --model.hidden_size 16 --model.num_attention_heads 2
        --model.num_hidden_layers 2 --tokenizer.algorithm bytes --task.row_length 8 --task.batch_tokens 16
        --training.reporting.log_every 1 --training.saving.checkpoint_every 1 --steps 4 --stages 2
        --device cpu --data {out}/text.txt --out {out}/run""".split()
    with (out / "shown").open("a") as shown, redirect_stderr(shown), redirect_stdout(shown):
        sys.exit(main(["train", *words]))


def exit_code(out: Path, number: int = 0, name: str = "") -> int | None:
    (out / "text.txt").write_text("some words to read\n" * 50)
    process = processes.Process(target=command, args=(out, number, name))
    process.start()
    process.join()
    return process.exitcode


def weights(out: Path, stage: int) -> bytes:
    return (out / "run" / f"stage-{stage}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final weights of stages that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    assert exit_code(out) == 0
    return weights(out, 2)


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGTERM, METRICS, 143),
        (signal.SIGKILL, METRICS, -signal.SIGKILL),
        (signal.SIGKILL, RECIPE, -signal.SIGKILL),
        (signal.SIGKILL, WEIGHTS, -signal.SIGKILL),
    ],
    ids=["stopped", "killed", "killed at its beginning", "killed at its end"],
)
def test_the_same_command_goes_on_in_the_second_stage(
    tmp_path: Path, whole: bytes, number: int, name: str, code: int
):
    assert exit_code(tmp_path, number, name) == code
    first = (tmp_path / "run/stage-1/model.safetensors").stat().st_mtime_ns
    assert (tmp_path / "run/stage-2").is_dir()
    if code == 143:
        assert f"resume with: the same command and --out {tmp_path}/run\n" in (tmp_path / "shown").read_text()
    assert exit_code(tmp_path) == 0
    assert (tmp_path / "run/stage-1/model.safetensors").stat().st_mtime_ns == first
    assert weights(tmp_path, 2) == whole
