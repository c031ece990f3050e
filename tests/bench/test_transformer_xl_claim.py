"""The claim of recurrence over segments: its verdict, its operations, and a small run of the real thing."""

import csv
import dataclasses
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.bench.reproduce.transformer_xl import (
    TransformerXLClaim,
    operations,
    plain_steps,
    run,
    verdict,
    without,
)

SEGMENTS, LONGER = without(64), without(128)
PAPER = {
    **{"0": 100.0, "32": 90.0, "64": 85.0, "128": 84.0},
    **dict(zip(SEGMENTS, (92.0, 88.0))),
    **dict(zip(LONGER, (86.0, 85.0))),
}


def test_perplexity_that_falls_with_the_memory_is_a_reproduction():
    text = verdict(PAPER, 64).text
    assert "at equal compute: reproduced (100.00 with 0 tokens, 85.00 with 64, best 84.00; without 92" in text
    assert text.endswith("rows of 128 without a memory are worse: 86.00, sliding 85.00")
    assert "of 128 without a memory are better: 83.00" in verdict({**PAPER, LONGER[0]: 83.0}, 64).text


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"32": 101.0}, "does not fall as the memory grows ("),
        ({"128": 87.0}, "it rises beyond the training's memory ("),
        ({SEGMENTS[1]: 83.0}, "the same segments without a memory are as good ("),
    ],
)
def test_every_difference_is_named(changes: dict[str, float], difference: str):
    assert f"differs from the paper: {difference}" in verdict({**PAPER, **changes}, 64).text.replace(
        "perplexity does", "does"
    )


def test_without_the_training_length_there_is_no_verdict():
    assert verdict({**PAPER, "32": 9.0}, 48).text.startswith("no verdict: it needs memories of 0 to")


def test_operations_are_those_of_the_layers():
    """By hand, for a width of 2, one layer, segments of 4, batches of 8 and 3 tokens in the vocabulary."""
    config = TransformerXLClaim(layers=1, width=2, heads=1, length=4, batch_tokens=8, vocabulary=3)
    assert operations(config, 4, 4) == (12 * 4 + 3 * 2 * 6 + 2 * 4 + 4) + 2 * 3
    assert operations(config, 0, 8) == (12 * 4 + 3 * 2 * 4 + 0 + 4) + 2 * 3
    assert operations(config, 0, 4) == (12 * 4 + 3 * 2 * 2 + 0 + 4 * 4 / 8) + 2 * 3
    for row in (4, 8):
        assert plain_steps(config, row) == round(2000 * operations(config, 4, 4) / operations(config, 0, row))


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    """A directory as WikiText-2's."""
    for name in ("train", "valid"):
        text = "".join(f" = Title {i} = \n\n The {name} text number {i} . \n\n" for i in range(30))
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def test_a_run_writes_its_figures_and_goes_on(articles: Path, capsys: pytest.CaptureFixture[str]):
    out = articles / "claim"
    config = TransformerXLClaim(
        data=str(articles),
        length=16,
        memories=(0, 16),
        steps=2,
        batch_tokens=64,
        layers=1,
        width=16,
        heads=2,
        vocabulary=300,
        out=str(out),
    )
    first = run(config)
    assert list(first) == ["0", "16", *without(16), *without(32)]
    assert first["0"] != first["16"]
    with (out / "transformer-xl.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["memory"]: float(row["perplexity"]) for row in rows} == first
    assert (out / "transformer-xl.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == first, "what is finished is not trained again"
    with pytest.raises(InputError, match="holds a run of other settings"):
        run(dataclasses.replace(config, steps=3))
    assert "a memory lowers perplexity at equal compute" in capsys.readouterr().out


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"memories: expected lengths of 0 or more, got \[-1\]"):
        TransformerXLClaim(memories=(-1,))
