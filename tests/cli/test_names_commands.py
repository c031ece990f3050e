"""The commands list and completion: the names that they know."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from polyformer.cli.commands.names import ListOptions, entries, matching, run_list
from polyformer.cli.documentation import members
from polyformer.cli.main import COMMANDS, main
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package
from polyformer.models.presets import MODELS

FRAGMENT = re.compile(r"(Of|All of|Nothing|What|Where|As|The same|With)\b|`\w+`:")


def is_sentence(text: str) -> bool:
    """Return whether `text` says what something is: a sentence, or a noun phrase with a full stop."""
    return bool(
        len(text) >= 20
        and re.match(r"[A-Z`]", text)
        and text.endswith(".")
        and not FRAGMENT.match(text)
        and text.count("`") % 2 == 0
        and text.count("(") == text.count(")")
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Nothing is built.",
        "`tokens`: of the vocabulary, at most.",
        "a window of tokens before the query.",
        "Window attention over the last tokens",
        "Window attention over the last tokens (Beltagy et al. 2020.",
    ],
)
def test_fragments_are_no_sentences(text: str):
    assert not is_sentence(text)


def test_every_entry_is_described():
    of_tests = {(axis, name) for axis, name, member in members() if not in_package(member)}
    rows = [row for row in entries() if row[:2] not in of_tests]
    times = Counter((axis, text) for axis, _, text, _ in rows)
    longest = {"recipe": 160}
    refused = [
        (axis, name, text)
        for axis, name, text, _ in rows
        if not is_sentence(text) or len(text) > longest.get(axis, 120) or times[axis, text] > 1
    ]
    assert not refused


def names(pattern: str) -> set[tuple[str, str]]:
    return {row[:2] for row in matching(pattern)}


def test_a_word_searches_names_descriptions_and_sources():
    sparse = names("sparse")
    assert {("preset", "sparse-transformer-small"), ("recipe", "sparse-transformer")} <= sparse
    assert {("Pattern", "Strided"), ("Pattern", "Fixed")} <= sparse  # by their source
    assert names("CHILD 2019 per layer") == {("Pattern", "PerLayer")}
    assert ("Mechanism", "lsh") in names("buckets") | names("bucket")  # by its description


def test_a_kind_lists_its_entries_and_wildcards_match_names():
    assert {kind for kind, _ in names("position")} == {"Position"}
    assert names("gpt2-*") == {("preset", name) for name in ("gpt2-medium", "gpt2-large", "gpt2-xl")}
    assert {kind for kind, _ in names("Ex*Rule")} == {"ExitRule"}
    assert names("*") == {row[:2] for row in entries()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Transformer-ED", ("preset", "transformer-base")),
        ("Transformer-D", ("preset", "decoder-small")),
        ("Transformer-DMCA", ("preset", "t-dmca-small")),
        ("MoE", ("FeedForward", "experts")),
        ("decision-transformer", ("preset", "dt-gym")),
        ("word2vec", ("command", "data vectors")),
        ("MLA", ("option", "attention.latent")),
    ],
)
def test_names_of_papers_are_understood(name: str, expected: tuple[str, str]):
    assert expected in names(name)


def test_an_unknown_word_is_an_error():
    with pytest.raises(InputError, match="unknown name 'performr': did you mean"):
        run_list(ListOptions(pattern="performr"))


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
