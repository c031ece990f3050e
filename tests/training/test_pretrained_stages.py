"""Stages that begin with a checkpoint: positions grow by copying, and what was killed goes on bit for bit."""

import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from forking import processes
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Global, Window
from polyformer.cli.main import main
from polyformer.models.architectures import Transformer
from polyformer.training.recipes import Run

TINY = """--model bert-base --model.hidden_size 16 --model.num_attention_heads 2 --model.num_hidden_layers 1
    --model.intermediate_size 16 --tokenizer.algorithm bytes --task.kind mlm --task.row_length 8"""
COMMON = "--task.batch_tokens 32 --training.saving.checkpoint_every 1 --steps 3 --device cpu --out"


def train(folder: Path, words: str, killed: bool = False) -> None:
    """`polyformer train`; `killed` as the second stage begins to write its second checkpoint."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if event == "open" else ""
        if "stage-2" in path and "step-00000002" in path:
            os.kill(os.getpid(), signal.SIGKILL)

    if killed:
        sys.addaudithook(audit)
    torch.set_num_threads(1)
    with (folder / "shown").open("a") as shown, redirect_stderr(shown), redirect_stdout(shown):
        sys.exit(main(["train", *words.split(), "--data", str(folder / "text.txt")]))


def exit_code(*arguments: Any) -> int | None:
    process = processes.Process(target=train, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def staged(folder: Path, out: str) -> str:
    return (
        f"longformer --pretrained {folder}/bert --task.row_length 12 --model.attention Window(2)|Global(1) "
        f"--data.format lines --optimizer.lr 0.008 --optimizer.weight_decay 0 --stages 2 "
        f"--training.reporting.log_every 1 {COMMON} {folder}/{out}"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a tiny BERT with learned positions for 8 tokens, and a run of two stages from it."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "text.txt").write_text("some words to read\n" * 40)
    assert exit_code(folder, f"default {TINY} {COMMON} {folder}/bert") == 0
    assert exit_code(folder, staged(folder, "whole")) == 0, (folder / "shown").read_text()
    return folder


def model(path: Path) -> Transformer:
    result: Any = polyformer.from_pretrained(path)
    return result


def window(path: Path) -> Any:
    stack = model(path).config.encoder
    assert stack is not None
    assert isinstance(stack.attention.mechanism, SoftmaxConfig)
    return stack.attention.mechanism.pattern


def test_windows_and_rows_double_and_rates_halve(folder: Path):
    first, second = folder / "whole/stage-1", folder / "whole/stage-2"
    assert [window(first), window(second)] == [Window(2) | Global(1), Window(4) | Global(1)]
    assert [model(path).config.max_position_embeddings for path in (folder / "bert", first, second)] == [
        8,
        12,
        24,
    ]
    assert [Run.open(path).recipe.optimizer.lr for path in (first, second)] == [0.008, 0.004]


def test_positions_are_copied(folder: Path):
    still = staged(folder, "still").replace("lr 0.008", "lr 1e-12")
    assert exit_code(folder, still) == 0
    name = "encoder.position.tables.0.weight"
    tables = [model(folder / path).state_dict() for path in ("bert", "still/stage-1", "still/stage-2")]
    short, middle, long = (table[name] for table in tables)
    torch.testing.assert_close(middle, torch.cat([short, short])[:12], rtol=0, atol=1e-8)
    torch.testing.assert_close(long, torch.cat([middle, middle]), rtol=0, atol=1e-8)
    for other in tables[0].keys() - {name}:
        torch.testing.assert_close(tables[2][other], tables[0][other], rtol=0, atol=1e-8)


def test_a_killed_second_stage_goes_on_bit_for_bit(folder: Path):
    words = staged(folder, "killed")
    assert exit_code(folder, words, True) == -signal.SIGKILL
    assert not (folder / "killed/stage-2/model.safetensors").exists()
    assert exit_code(folder, words) == 0
    ends = [(folder / out / "stage-2/model.safetensors").read_bytes() for out in ("killed", "whole")]
    assert ends[0] == ends[1]
