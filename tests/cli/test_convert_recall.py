"""`polyformer convert --recall`: numbers hidden in the text, before and after, and what counts as lost."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyformer.cli.commands.before_after import (
    Comparison,
    TextMeasurement,
    comparison_table,
    quality_losses,
)
from polyformer.cli.main import main
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.presets import create_model


def compared(length: int, before: float | None, after: float | None) -> Comparison:
    measured = TextMeasurement(torch.zeros(1), seconds=1, tokens=1, mib=0)
    return Comparison(length, measured, measured, False, (before, after))


def test_a_lower_recall_is_a_loss():
    rows = [compared(512, None, None), compared(1024, 1.0, 0.96), compared(2048, 1.0, 0.5)]
    assert quality_losses(rows, 0.05) == [
        "of the numbers hidden in 2,048 tokens it finds 50.0%, before 100.0%"
    ]
    heading, *lines = comparison_table(rows)
    assert heading.endswith("recall")
    assert [line.split()[-3:] for line in lines[1:]] == [["100.0%", "->", "96.0%"], ["100.0%", "->", "50.0%"]]
    assert lines[0].endswith("- -> -")
    assert "recall" not in comparison_table([compared(512, None, None)])[0]


def saved(folder: Path, preset: str, **options: object) -> Path:
    """A tiny model of bytes, with its tokenizer."""
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    tokenizer.save(folder)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    create_model(preset, vocab_size=len(tokenizer), **sizes, **options).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The sun rises in the east. It sets in the west. " * 60)
    return path


def test_the_command_shows_the_recall(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]):
    model = saved(tmp_path / "model", "decoder-tiny", position="rope")
    words = ["convert", model, tmp_path / "out", "--attention", "Window(8)", "--evaluate", text]
    more = ["--lengths", "300,700", "--tokens", "700", "--recall", "2", "--tolerance", "100"]
    assert main([*map(str, words), *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    (heading,) = (number for number, line in enumerate(lines) if line.endswith("recall"))
    assert lines[heading + 1].endswith("- -> -")  # too short for the prompt
    assert lines[heading + 2].split()[-3:] == ["0.0%", "->", "0.0%"]


def test_recall_requires_a_text_and_a_decoder(tmp_path: Path, text: Path, complaint: Callable[..., str]):
    words = ["convert", saved(tmp_path / "encoder", "encoder-tiny", head="masked"), tmp_path / "out"]
    assert "--recall: requires --evaluate TEXT" in complaint(*words, "--recall", "2")
    said = complaint(*words, "--evaluate", text, "--recall", "2")
    assert "expected a decoder alone that predicts the next token" in said
