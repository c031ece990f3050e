"""`polyformer answer`: questions on a file, one or many, and what it says where it cannot."""

import io
import json
from pathlib import Path

import pytest

from polyformer.cli.main import main

ROW = {"question": "Where?", "context": "Here it is.", "answers": {"text": ["Here"], "answer_start": [0]}}
TINY = ["--steps", "2", "--device", "cpu", "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("answers")
    (root / "questions.jsonl").write_text((json.dumps(ROW) + "\n") * 20)
    command = [
        "train",
        "--task.kind",
        "qa",
        "--model",
        "encoder-tiny",
        "--data",
        str(root / "questions.jsonl"),
    ]
    assert main([*command, "--out", str(root / "run"), *TINY]) == 0
    return str(root / "run")


@pytest.fixture
def article(tmp_path: Path) -> str:
    path = tmp_path / "article.txt"
    path.write_text("A text of\ntwo lines. " * 40)
    return str(path)


def test_a_question(run: str, article: str, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["answer", run, article, "What?", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0]
    assert lines[0] in " ".join(Path(article).read_text().split())


def test_every_line_is_a_question(
    run: str, article: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("What?\nWhy?\nHow?\n"))
    capsys.readouterr()
    assert main(["answer", run, article, "--device", "cpu"]) == 0
    answers = capsys.readouterr().out
    assert len(answers.splitlines()) == 3
    assert main(["answer", run, article, "What?", "Why?", "How?", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == answers


def test_a_file_that_is_not_there(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["answer", run, str(tmp_path / "none.txt"), "What?"]) == 2
    assert "none.txt: cannot be read" in capsys.readouterr().err
