"""`polyformer train --task.kind choose` and `polyformer choose`, with runs and with checkpoints."""

import io
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch

from polyformer.cli.main import main
from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.models.checkpoints import from_pretrained
from polyformer.nn.heads import ChooseConfig, ClassifyConfig

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
def test_what_is_no_question(
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
