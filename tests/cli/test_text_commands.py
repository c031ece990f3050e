"""The commands answer, choose and translate on texts of arguments, files and standard input."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
import yaml

from polyformer.cli.main import main
from polyformer.data.rows.noising import add_sentinels
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.checkpoints import from_pretrained
from polyformer.nn.heads import ChooseConfig, ClassifyConfig

ROW = {"question": "Where?", "context": "Here it is.", "answers": {"text": ["Here"], "answer_start": [0]}}
TINY_ANSWERS = [
    "--steps",
    "2",
    "--device",
    "cpu",
    "--tokenizer.algorithm",
    "bytes",
    "--model.hidden_size",
    "16",
]


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
    assert main([*command, "--out", str(root / "run"), *TINY_ANSWERS]) == 0
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


TINY = ["--steps", "2", "--device", "cpu", "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]
CHOICES = ["a fine film", "Oslo", "of them"]
LIST = '["a fine film", "Oslo", "of them"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("choices")
    (root / "rows.csv").write_text(
        "text,choice1,choice2,label\n" + "cat,miaows,barks,0\ndog,miaows,barks,B\n" * 9
    )
    words = ["train", "--data", str(root / "rows.csv"), "--model", "encoder-tiny", "--out", str(root / "run")]
    assert main([*words, *TINY]) == 0
    return root / "run"


def test_a_question_is_a_line_of_standard_input(
    folder: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    choice, share = output("choose", folder, "cow", "--choices", LIST).rstrip("\n").split("\t")
    assert choice in CHOICES
    assert 1 / 3 < float(share) <= 1
    lines = f"{choice}\t{share}\n" * 2
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("\t".join(["cow", *CHOICES]) + "\n" + "\t".join(["cow", *CHOICES]))
    )
    assert output("choose", folder) == lines
    monkeypatch.setattr("sys.stdin", io.StringIO("cow\ncow\n"))
    assert output("choose", folder, "--choices", LIST) == lines
    assert output("choose", folder, "cow", "cow", "--choices", LIST) == lines


def test_a_run_is_measured_beside_the_majority(folder: Path, output: Callable[..., str]):
    shown = output("evaluate", folder)
    assert "accuracy" in shown
    assert "majority" in shown


@torch.no_grad()
def test_a_checkpoint_as_its_model_scores(tmp_path: Path, output: Callable[..., str]):
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path), ChooseConfig())
    shown = output("choose", tmp_path, "Anna flew to", "--choices", LIST)
    model, tokenizer = from_pretrained(tmp_path).eval(), load_tokenizer(tmp_path)
    scores = []
    for choice in CHOICES:  # a question of one choice each: the score alone
        ids, types = tokenizer.encode_for_model("Anna flew to", choice)
        inputs = {"input_ids": torch.tensor([[ids]]), "token_type_ids": torch.tensor([[types]])}
        scores.append(model(**inputs).logits[0, 0])
    shares = torch.stack(scores).softmax(0)
    assert shown == f"{CHOICES[int(shares.argmax())]}\t{float(shares.max()):.4f}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cow",), "QUESTION: expected a question and two or more choices separated by tabs, or --choices"),
        (("cow", "--choices", "red,green"), "--choices: not JSON"),
        (("cow", "--choices", '["red"]'), "--choices: expected two choices or more, got ['red']"),
        (("", "--choices", LIST), "TEXT: expected a text, got only white space"),
    ],
)
def test_a_question_without_two_choices_is_refused(
    words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    assert main(["choose", str(folder), *words, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_of_another_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path), ClassifyConfig())
    assert main(["choose", str(tmp_path), "cow", "--choices", LIST, "--device", "cpu"]) == 2
    assert "which cannot choose; use polyformer classify" in capsys.readouterr().err


def test_a_t5_goes_on_with_a_mixture(tmp_path: Path, output: Callable[..., str]):
    t5 = tmp_path / "t5"
    t5.mkdir()
    tokenizer = add_sentinels(checkpoints.piece_files(t5))
    tokenizer.save(t5)
    checkpoints.save(t5, "t5-small", tokenizer, head_size=8)
    (tmp_path / "mood.tsv").write_text("Anna flew\t1\nTom flew\t0\n" * 3)
    (tmp_path / "text.txt").write_text("\n".join(checkpoints.TEXT))
    mood = {"path": "mood.tsv", "validation": "mood.tsv", "header": ["source", "target"]}
    parts = {
        "mood": {"prefix": "film: ", "words": {"0": "Oslo", "1": "Paris"}, "data": mood},
        "spans": {"form": "spans", "data": {"path": "text.txt", "format": "lines"}},
    }
    task = {"kind": "text_to_text", "max_length": 16, "max_target": 8, "batch_tokens": 64, "parts": parts}
    recipe = tmp_path / "mixture.yaml"
    recipe.write_text(yaml.safe_dump({"task": {**task, "folder": str(tmp_path)}}))
    run = tmp_path / "run"
    command = ["train", str(recipe), "--pretrained", str(t5), "--out", str(run), "--steps", "2"]
    assert main([*command, "--device", "cpu"]) == 0
    table = output("evaluate", run)
    assert all(word in table for word in ("mood loss", "mood accuracy", "mood majority", "spans loss"))
    assert output("evaluate", run) == table
    assert len(output("translate", run, "film: Anna flew").splitlines()) == 1
