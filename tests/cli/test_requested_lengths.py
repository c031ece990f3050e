"""Lengths that a text cannot have: refused before a converted model is written."""

from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("8,1000000000", "--lengths: expected at most 16777216, got 1000000000"),
        ("8,16777216", "tokens, too few for a length of 16777216; use a longer text or smaller lengths"),
    ],
)
def test_converting(lengths: str, message: str, tmp_path: Path, complaint: Callable[..., str]):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    checkpoints.save(folder, "gpt2", checkpoints.byte_files(folder, "gpt2"))
    text = tmp_path / "text.txt"
    text.write_text("A short text. " * 20)
    out = tmp_path / "out"
    assert message in complaint("convert", folder, out, "--evaluate", text, "--lengths", lengths)
    assert not out.exists()
