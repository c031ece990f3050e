"""`polyformer fit-pattern`, from a run to a pattern that the other commands read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyformer.attention.patterns import Pattern
from polyformer.cli.main import main
from polyformer.models.checkpoints import from_pretrained

Trained = Callable[[str], Path]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog and more\n" * 40)
    return str(path)


@pytest.fixture
def fit(train_tiny: Trained, text: str) -> Callable[..., int]:
    def run(*words: object) -> int:
        return main(
            ["fit-pattern", str(train_tiny("lm")), "--text", text, "--length", "24", *map(str, words)]
        )

    return run


def test_a_pattern_is_found_compared_and_applied(
    train_tiny: Trained,
    fit: Callable[..., int],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    out, figure = tmp_path / "pattern.txt", tmp_path / "heads.png"
    options = ("--budget", "0.6,0.9", "--evaluate", text, "--tokens", 48, "--out", out, "--figure", figure)
    assert fit(*options) == 0
    printed = capsys.readouterr().out
    assert printed.index("budget 0.6: ") < printed.index("budget 0.9: ") < printed.index("dense -> sparse:")
    assert "attention mass lost" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    pattern = out.read_text().strip()
    assert main(["convert", str(train_tiny("lm")), str(tmp_path / "sparse"), "--attention", pattern]) == 0
    for model in (from_pretrained(tmp_path / "sparse"), from_pretrained(train_tiny("lm"), attention=pattern)):
        mechanism: Any = model.config.decoder.attention.mechanism  # type: ignore[union-attr]
        assert mechanism.pattern == Pattern.from_text(pattern)


def test_wrong_options_are_one_line(fit: Callable[..., int], text: str, capsys: pytest.CaptureFixture[str]):
    for words, expected in (
        (("--budget", "1.5"), "budget: expected a share of all pairs"),
        (("--budget", "much"), "--budget: expected numbers"),
        (("--probe", "vt"), "--probe: requires --evaluate TEXT"),
        (("--evaluate", text, "--probe", "vt"), "lengths: vt: the shortest prompt"),
        (("--figure", "heads.jpeg"), "--figure 'heads.jpeg'"),
        (("--evaluate", "missing.txt"), "missing.txt: cannot be read"),
    ):
        capsys.readouterr()
        assert fit(*words) == 2
        printed, error = capsys.readouterr()
        assert expected in error
        assert "measured" not in printed
        assert error.count("\n") == 1
