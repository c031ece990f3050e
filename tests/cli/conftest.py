"""Tiny data and tiny trained runs, made through the command line itself; what the command line says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from polyformer.cli.main import main

TINY = ["--steps", "2", "--device", "cpu", "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]
DATA = {
    "lm": ("text.txt", "".join(f"line {i} of a small text\n" for i in range(60))),
    "mlm": ("text.txt", "".join(f"line {i} of a small text\n" for i in range(60))),
    "translate": ("pairs.tsv", "source\ttarget\n" + "".join(f"word {i}\tWort {i}\n" for i in range(20))),
    "classify": ("reviews.csv", "text,label\n" + "good film,pos\nbad film,neg\n" * 10),
    "tag": ("tags.conll", "Anna\tB-PER\nsleeps\tO\n\nin\tO\nNew\tB-LOC\nYork\tI-LOC\n\n" * 10),
}
MODELS = {"lm": "decoder-tiny", "translate": "transformer-tiny"}


@pytest.fixture(scope="session")
def train_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`train_tiny(task)`: the folder of a finished run of that task; each is trained once."""
    root = tmp_path_factory.mktemp("tiny")
    done: dict[str, Path] = {}

    def train(task: str) -> Path:
        if task not in done:
            name, text = DATA[task]
            (root / name).write_text(text)
            command = ["train", "--task.kind", task, "--model", MODELS.get(task, "encoder-tiny")]
            folder = root / task
            assert main([*command, "--data", str(root / name), "--out", str(folder), *TINY]) == 0
            done[task] = folder
        return done[task]

    return train


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`output(*words)`: what the command prints, run on the CPU."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), "--device", "cpu"]) == 0
        return capsys.readouterr().out

    return run
