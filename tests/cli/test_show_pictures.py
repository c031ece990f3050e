"""`polyformer show pattern` and `show position`, from words to text, files and complaints."""

import os
from pathlib import Path
from typing import Any

import pytest

from polyformer.attention.patterns import Pattern
from polyformer.cli.main import main
from polyformer.cli.plots import pattern as pattern_pictures
from polyformer.core.sequence.context import Context


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


def test_a_pattern_as_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "50")
    text = output(capsys, "pattern", "Window(8) | Global(2)", "--length", "200", "--causal")
    assert max(map(len, text.split("\n"))) <= 50
    assert "Keys per query: 1-11" in text
    assert "layout (" in text


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["Window(64)"], 256),
        (["Window(64)", "--causal"], 256),
        (["Window(8)"], 64),
        (["Full"], 64),
        (["Window(64)", "--length", "64"], 64),
    ],
)
def test_a_pattern_is_drawn_at_a_length_where_it_shows(
    words: list[str], tokens: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "60")
    lengths: list[int] = []
    pictures = pattern_pictures.pictures

    def watched(pattern: Pattern, context: Context, **options: Any) -> Any:
        lengths.append(context.q_len)
        return pictures(pattern, context, **options)

    monkeypatch.setattr(pattern_pictures, "pictures", watched)
    output(capsys, "pattern", *words)
    assert lengths[-1] == tokens


def test_paths_of_a_pattern(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "paths.svg"
    sparse = output(
        capsys, "pattern", "Window(8) | Global(1)", "--paths", "--length", "64", "--out", str(path)
    )
    assert "Every pair is connected within 2 layers" in sparse
    assert "     2 100.0 %" in sparse
    assert f"Drawn in {path}" in sparse
    assert b"fraction of the pairs connected" in path.read_bytes()
    causal = output(capsys, "pattern", "Strided(32)", "--paths", "--length", "64", "--causal")
    assert "1.59 % of the pairs are connected, within 1 layer" in causal  # 32 of 64 * 63 / 2
    assert "No pair of tokens is connected." in output(
        capsys, "pattern", "Strided(9)", "--paths", "--length", "9"
    )


def test_heads_and_layers(capsys: pytest.CaptureFixture[str]):
    heads = ["pattern", "PerHead([Window(1), Full])", "--length", "8"]
    assert output(capsys, *heads).count("mask (") == 2
    assert output(capsys, *heads, "--heads", "1").count("mask (") == 1
    layer = output(capsys, "pattern", "PerLayer([Window(1), Full])", "--length", "8", "--layer", "1")
    assert layer.startswith("Full()\nKeys per query: 8, 8 on average.")


def test_a_smaller_block_skips_more(capsys: pytest.CaptureFixture[str]):
    words = ["pattern", "Window(1)", "--length", "8", "--block"]
    assert "computes 100 %" in output(capsys, *words, "8")
    assert "computes 34.4 %" in output(capsys, *words, "1")


def test_a_position_scheme_as_text(capsys: pytest.CaptureFixture[str]):
    assert "head 1           0   -0.0625" in output(capsys, "position", "alibi", "--length", "8")
    assert "all heads" in output(capsys, "position", "{kind: rope, base: 50}", "--length", "8")


@pytest.mark.parametrize(
    ("words", "name"), [(("pattern", "Window(3)"), "a.png"), (("position", "alibi", "--heads", "1"), "a.SVG")]
)
def test_figures(words: tuple[str, ...], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / name
    assert output(capsys, *words, "--length", "9", "--out", str(path)) == f"Drawn in {path}\n"
    assert os.listdir(path.parent) == [name]
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pattern", "NAME is missing: expected a pattern such as 'Window(8) | Global(2)'"),
        ("position", "NAME is missing: expected a position scheme such as 'alibi'"),
        ("pattern Windw(8)", "unknown pattern 'Windw': did you mean 'Window'"),
        ("pattern Window(0)", "a window of 0 keys"),
        ("pattern Full --length 0", "--length: expected 1 or more, got 0"),
        ("pattern Full --length 4097", "length: expected 1 to 4096, got 4097"),
        ("pattern Full --length many", "--length: expected int, got 'many'"),
        ("pattern Full --block 0", "block: expected 1 or more, got 0"),
        ("pattern Full --heads 0", "heads: expected 1 to 64, got 0"),
        ("pattern Full --layer -1", "layer: layers count from 0, got -1"),
        ("pattern Full --out a.gif", "unknown format of --out 'a.gif'"),
        ("pattern Full --out a", "unknown format of --out 'a' '': expected one of '.png', '.svg'"),
        ("position alibbi", "unknown kind of position 'alibbi': did you mean 'alibi'"),
        ("position {", "; expected a kind, or a mapping in YAML"),
        ("position alibi --length 2000", "length: expected 1 to 1024, got 2000"),
        ("position alibi --layer 0", "--layer: only for `show pattern`"),
        ("position alibi --paths", "--paths: only for `show pattern`"),
        ("pattern Full --paths --length 1025", "length: expected 1 to 1024, got 1025"),
        ("position none", "'none': nothing to draw"),
        ("pattern Full() --mesh data=2", "--mesh: only for models"),
        ("gpt2 --length 8", "--length: only for `show pattern` and `show position`"),
        ("gpt2 Full", "unexpected 'Full'"),
    ],
)
def test_wrong_words(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
