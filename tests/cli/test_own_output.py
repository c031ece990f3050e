"""A command prints only what polyformer says, and sets an environment of its own, never that of a program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyformer.cli.main import VARIABLES

NOISE = """
import logging, sys, warnings
import datasets, tqdm
from polyformer.core.errors import Caution
from tokenizers import Tokenizer

warnings.warn("another library warns")
warnings.warn("a thing changes", FutureWarning)
logging.getLogger("another").warning("another library logs")
list(tqdm.tqdm(range(3)))
datasets.Dataset.from_list([{"a": 1}] * 3).map(lambda row: row)
warnings.warn("our own\\nwarning", Caution)
"""
"""What libraries print; only the last line is ours."""


def run(words: list[str], folder: Path, **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=clean | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_other_libraries_are_not_heard(tmp_path: Path):
    (tmp_path / "noise.py").write_text(NOISE.replace("\\\\", "\\"))
    words = ["-m", "polyformer", "list", "recipe", "--import", "noise.py"]
    assert run(words, tmp_path) == "polyformer: our own warning\n"
    heard = run(["-W", "default", *words], tmp_path, TQDM_DISABLE="")
    assert "another library warns" in heard
    assert "3/3" in heard


def test_a_program_hears_them(tmp_path: Path):
    code = "import os, warnings, polyformer, polyformer.cli.main; print(os.environ); "
    code += "import tqdm; list(tqdm.tqdm(range(3))); warnings.warn('another library warns')"
    heard = run(["-c", code], tmp_path)
    assert "3/3" in heard
    assert "another library warns" in heard


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["export", "run", "onnx"], []),
        (["evaluate", "run"], []),
        (["convert", "run", "hub", "--format", "hub"], []),
        (["datastore", "build", "run", "text.txt", "--out", "store"], ["entries/s"]),
        (["embed", "run", "text.txt", "--pooling", "mean", "--out", "vectors.parquet"], ["texts/s"]),
        (["generate", "run", "--prompt", "line", "--max-new-tokens", "2"], []),
    ],
)
def test_commands_print_only_their_own(words: list[str], own: list[str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small text\n" for i in range(200)))
    command = "-m polyformer train --data text.txt --out run --model decoder-tiny --steps 2 --device cpu"
    settings = "--model.hidden_size 16 --tokenizer.vocab_size 300"
    assert run([*command.split(), *settings.split()], tmp_path) == ""
    for line in run(["-m", "polyformer", *words], tmp_path).splitlines():
        assert line.startswith("polyformer: ") or any(part in line for part in own), line


CODE = """
import os, sys
from polyformer.cli.main import main
assert "torch" not in sys.modules, "too late"
main(sys.argv[1:])
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("THP_MEM_ALLOC_ENABLE"))
"""


@pytest.mark.parametrize(
    ("environment", "command", "expected"),
    [
        ({}, "list", ["1000", "1"]),
        ({"GOMP_SPINCOUNT": "7"}, "list", ["7", "1"]),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "list", ["None", "1"]),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "bench", ["None", "0"]),
    ],
)
def test_settings_of_the_user_prevail(environment: dict[str, str], command: str, expected: list[str]):
    ours = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE"}
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    words = [sys.executable, "-c", CODE, command, "--help"]
    done = subprocess.run(words, env=clean | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == expected
