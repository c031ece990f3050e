"""`polyformer generate` under torchrun: half of the heads in each process, and the text of one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launching import torchrun
from polyformer.cli.commands.generate import GenerateOptions, settings_of, write_texts
from polyformer.cli.commands.generate import run as command
from polyformer.cli.commands.processes import tensor_parallel

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 20, "seed": 5},
    "beams": {"num_beams": 3},
    "drafted": {"draft": "lookup"},
}


def asked(run: str, name: str) -> GenerateOptions:
    """One of the settings, for a text of 12 tokens."""
    return GenerateOptions(run=run, prompt=("some words",), max_new_tokens=12, device="cpu", **SETTINGS[name])


def test_two_processes_write_what_one_does(
    train_tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_tiny("lm")
    capsys.readouterr()
    for name in SETTINGS:
        command(asked(str(run), name))
    expected = capsys.readouterr().out
    ended = torchrun(__file__, run, *SETTINGS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout == expected
    assert ended.stdout.count("some words") == len(SETTINGS)


if __name__ == "__main__":
    with tensor_parallel("cpu") as shard:
        for setting in sys.argv[2:]:
            options = asked(sys.argv[1], setting)
            write_texts(options, settings_of(options), shard)
