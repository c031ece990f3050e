"""`evaluate` reads other data as the run read its own, and writes the report."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from polyformer.cli.main import main
from polyformer.cli.plots.report import REPORT
from polyformer.cli.plots.report.page import Growth
from polyformer.training.recipes.run import Run

TINY = ["--steps", "2", "--device", "cpu", "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PAIRS = [[f"the word {name} .", f"das Wort {name} !"] for name in NUMBERS * 2]


def lines(rows: Sequence[Sequence[str]], delimiter: str = "\t") -> str:
    return "".join(f"{delimiter.join(row)}\n" for row in rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator of the second column of a file without a heading into the first."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "pairs.txt").write_text(lines([pair[::-1] for pair in PAIRS]))
    words = ["--data", str(folder / "pairs.txt"), "--data.header", "[target, source]", "--out"]
    assert (
        main(["train", "translate", "--model", "transformer-tiny", *words, str(folder / "run"), *TINY]) == 0
    )
    return folder / "run"


@pytest.fixture
def scores(output: Callable[..., str]) -> Callable[..., list[str]]:
    """`scores(*words)`: the metrics that `evaluate` prints, without the name of the data."""
    return lambda *words: output("evaluate", *words).splitlines()[-1].split()[-3:]


@pytest.mark.parametrize(
    ("name", "rows", "delimiter", "words"),
    [
        ("same.txt", [pair[::-1] for pair in PAIRS[:6]], "\t", []),
        ("other.tsv", [pair[::-1] for pair in PAIRS[:6]], "\t", []),
        ("other.csv", [pair[::-1] for pair in PAIRS[:6]], ",", []),
        ("headed.txt", [["source", "target"], *PAIRS[:6]], "\t", []),
        ("headed.csv", [["target", "source"], *(pair[::-1] for pair in PAIRS[:6])], ",", []),
        ("English.csv", [["English", "German"], *PAIRS[:6]], ",", ["--data.columns.source", "English"]),
        ("swapped.csv", PAIRS[:6], ",", ["--data.header", "[source, target]"]),
    ],
)
def test_other_files_with_the_same_rows_have_the_same_metrics(
    name: str,
    rows: list[list[str]],
    delimiter: str,
    words: list[str],
    run: Path,
    tmp_path: Path,
    scores: Callable[..., list[str]],
):
    (tmp_path / "pairs.jsonl").write_text(
        "".join(f'{{"source": "{source}", "target": "{target}"}}\n' for source, target in PAIRS[:6])
    )
    (tmp_path / name).write_text(lines(rows, delimiter))
    expected = scores(run, "--data", tmp_path / "pairs.jsonl")
    assert scores(run, "--data", tmp_path / name, *words) == expected


def test_settings_change_the_own_data(run: Path, output: Callable[..., str], complaint: Callable[..., str]):
    assert "test" not in output("evaluate", run)
    assert "test" in output("evaluate", run, "--data.test_fraction", "0.2")
    assert "unknown option of data 'heder': did you mean 'header'" in complaint(
        "evaluate", run, "--data.heder", "[a]"
    )


def test_a_report_is_written_when_asked_for(
    run: Path, tmp_path: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    measured = [Growth("dense", (256, 512), (1.5, 6.25), (32896, 131328))]
    monkeypatch.setattr("polyformer.cli.plots.report.measure_growth", lambda: measured)
    assert not (run / REPORT).exists()
    assert f"Report: {run / REPORT}" in output("train", "--resume", run, "--report")
    assert "Evaluations" not in (run / REPORT).read_text()
    (tmp_path / "new.txt").write_text(lines([pair[::-1] for pair in PAIRS[:4]]))
    assert "Report" not in output("evaluate", run, "--data", tmp_path / "new.txt")
    assert "Report" in output("evaluate", run, "--data", tmp_path / "new.txt", "--report")
    assert "new.txt" in (run / REPORT).read_text().partition("Evaluations")[2]
    assert list(Run.open(run).facts["evaluations"]) == [str(tmp_path / "new.txt")]
