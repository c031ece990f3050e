"""`polyformer completion`: its bash script is run by a real bash, the others are looked at."""

import shutil
import subprocess
from pathlib import Path

import pytest

from polyformer.cli.main import COMMANDS, main
from polyformer.models.presets import MODELS

ASK = """
source "$1"; shift
function_of() { set -- $(complete -p polyformer); while [ "$1" != -F ]; do shift; done; echo "$2"; }
COMP_WORDS=(polyformer "$@"); COMP_CWORD=$#; COMP_LINE="polyformer $*"; COMP_POINT=${#COMP_LINE}
"$(function_of)"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import contextlib

    path = tmp_path_factory.mktemp("completion") / "polyformer"
    with path.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["completion", "bash"]) == 0
    return path


def completed(script: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    arguments = [bash, "--noprofile", "--norc", "-c", ASK, "bash", str(script), *words]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ([""], {*COMMANDS}),
        (["tr"], {"train", "translate"}),
        (["train", "wiki"], {"wikitext2"}),
        (["train", "--st"], {"--steps", "--stages"}),
        (["train", "--device", ""], {"auto", "cpu", "cuda"}),
        (["train", "--model.attention", "l"], {"linear", "linformer", "lsh"}),
        (["train", "--training.cl"], {"--training.clip"}),
        (["train", "--data", "no"], {"notes.txt"}),
        (["evaluate", "r"], {"runs"}),
        (["bench", "g"], {"generation"}),
        (["reproduce", "wa"], {"warmup"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(words: list[str], offers: set[str], script: Path, tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "runs").mkdir()
    assert {*completed(script, tmp_path, *words)} == offers


@pytest.mark.parametrize("words", [["train", "--model", ""], ["show", ""]])
def test_bash_completes_presets(words: list[str], script: Path, tmp_path: Path):
    assert {*completed(script, tmp_path, *words)} == {*MODELS.names()}


@pytest.mark.parametrize(("shell", "start"), [("zsh", "#compdef polyformer"), ("fish", "")])
def test_other_shells(shell: str, start: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text.startswith(start)
    assert all(name in text for name in COMMANDS)
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=text, text=True, check=True)


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "ksh"]) == 2
    assert "SHELL: expected 'bash' or 'zsh' or 'fish', got 'ksh'" in capsys.readouterr().err
