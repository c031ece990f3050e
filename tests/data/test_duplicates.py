"""Held-out rows that repeat training rows are counted, and can be kept on one side."""

import dataclasses
import json
from pathlib import Path

import pytest

from polyformer.cli.main import main
from polyformer.data import DataConfig, load
from polyformer.data.sources.checks import Overlap, count, overlaps
from polyformer.data.sources.held_out import normalized

SOURCES = [f"Word number {i} of them" for i in range(40)]
PAIRS = [(source, f"Wort {i} {n}") for i, source in enumerate(SOURCES) for n in range(1 + i % 3)]
NEEDS = "source", "target"


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("source\ttarget\n" + "".join(f"{source}\t{target}\n" for source, target in rows))
    return str(path)


def test_case_spaces_and_punctuation_do_not_count():
    for first, second in (
        ("It's  fine, Anna!", "its FINE anna"),
        ("Vi\u1ec7t Nam", "VI\u0045\u0323\u0302T nam."),
        ("\u201cGo\u201d \u2013 he said", "go he said"),
        ("\u4f60\u597d\u3002", "\u4f60\u597d"),
        ("STRASSE", "Straße"),
    ):
        assert normalized(first) == normalized(second), (first, second)
    for first, second in (("a + b", "a = b"), ("\u0915\u093f", "\u0915\u0940"), ("...", "!"), ("1.5", "16")):
        assert normalized(first) != normalized(second), (first, second)
    assert normalized(["New", "York"]) == normalized("new york")
    assert normalized(b"a.") == b"a."


def test_counts_are_of_held_out_rows():
    train = [("A b.",), ("c",), ("c",), ("d",)]
    held = [("A b.",), ("a b",), ("a b",), ("c",), ("e",)]
    assert count(train, held, 100) == Overlap(held=5, exact=2, near=2, trained=4, complete=True)
    assert count(train, held, 5) == Overlap(held=2, exact=1, near=1, trained=2, complete=False)


@pytest.mark.parametrize(
    ("rows", "exact", "near"),
    [
        ([{"text": "a", "pair": "b", "label": "1"}, {"text": "a", "pair": "c", "label": "1"}], 0, 0),
        ([{"text": "a", "label": "1"}, {"text": "A.", "label": "2"}], 0, 1),
        ([{"tokens": ["a", "b"], "tags": ["O", "O"]}, {"tokens": ["a", "b"], "tags": ["X", "O"]}], 1, 0),
        ([{"source": "a", "target": "b"}, {"source": "a", "target": "c"}], 1, 0),
    ],
)
def test_inputs_of_tasks(rows: list[dict[str, object]], exact: int, near: int, tmp_path: Path):
    for name, row in zip(("train", "test"), rows):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    files = {"path": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/test.jsonl"}
    config, columns = DataConfig(**files), tuple(rows[0])
    counts, notes = overlaps(config, load(config, columns), columns)
    assert (counts["validation"]["exact"], counts["validation"]["near"]) == (exact, near)
    assert len(notes) == bool(exact + near)
    assert not any("--data.together" in note for note in notes)  # the splits are separate files


@pytest.mark.parametrize("streaming", [False, True])
def test_repeated_sources_stay_on_one_side(streaming: bool, tmp_path: Path):
    path = write(tmp_path / "pairs.tsv", [*PAIRS, *((f"{source}!", "x") for source in SOURCES)])
    config = DataConfig(path=path, validation_fraction=0.2, streaming=streaming)
    counts, notes = overlaps(config, load(config, NEEDS), NEEDS)
    assert counts["validation"]["exact"] > 0 < counts["validation"]["near"]
    (note,) = notes
    assert "repeat a source of the training rows" in note
    assert "(--data.together source keeps all rows with the same source on one side)" in note
    grouped = dataclasses.replace(config, together="source")
    splits = load(grouped, NEEDS)
    counts, notes = overlaps(grouped, splits, NEEDS)
    assert (counts["validation"]["exact"], counts["validation"]["near"], notes) == (0, 0, [])
    assert splits.validation is not None
    sizes = [len(list(rows)) for rows in (splits.train, splits.validation)]
    assert sum(sizes) == len(PAIRS) + len(SOURCES)
    assert 0.1 < sizes[1] / sum(sizes) < 0.35
    assert {*next(iter(splits.train))} == {*NEEDS}


def test_train_says_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--steps", "1", "--device", "cpu", "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]
    command = ["train", "--data", write(tmp_path / "pairs.tsv", PAIRS), *words, "--out"]
    assert main([*command, str(tmp_path / "run")]) == 0
    held = json.loads((tmp_path / "run/run.json").read_text())["repeated"]["validation"]
    share = f"{held['exact']} of {held['held']} held-out rows ({100 * held['exact'] / held['held']:.1f} %)"
    assert f"validation: {share} repeat a source of the training rows" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "other"), "--data.together", "source"]) == 0
    assert "repeat a source" not in capsys.readouterr().out
