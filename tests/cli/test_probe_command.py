"""`polyformer probe`: runs, checkpoints, models of transformers, the table, the file, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest

from polyformer.cli.main import main

Trained = Callable[[str], Path]
FEW = ["--samples", 2, "--max-new-tokens", 3]


def test_a_conversion_of_a_run(train_tiny: Trained, tmp_path: Path, output: Callable[..., str]):
    out, longer = tmp_path / "probe.json", tmp_path / "longer"
    assert main(["convert", str(train_tiny("lm")), str(longer), "--max-positions", "1024"]) == 0
    words = ["probe", longer, "--tasks", "niah_single_2,vt", "--lengths", "900,700", *FEW]
    printed = output(*words, "--out", out)
    lines = printed.splitlines()
    assert lines[0].split() == ["tokens", "700", "900"]
    assert [line.split()[0] for line in lines[1:]] == ["niah_single_2", "vt", "mean"]
    record = json.loads(out.read_text())
    assert (record["samples"], record["seed"], record["shots"]) == (2, 0, 0)
    cases = [(result["task"], result["length"]) for result in record["results"]]
    assert cases == [("niah_single_2", 700), ("vt", 700), ("niah_single_2", 900), ("vt", 900)]
    for result in record["results"]:
        room = result["length"] - (128 if result["task"].startswith("niah") else 30)
        assert all(room - 100 < answer["tokens"] <= room for answer in result["answers"])
    assert output(*words) == printed
    output(*words[:4], "--lengths", "700", *FEW, "--cache", "h2o(budget=8)", "--out", out)
    assert json.loads(out.read_text())["cache"] == "h2o(budget=8)"


def test_a_checkpoint_and_questions(tmp_path: Path, output: Callable[..., str]):
    folder, squad = tmp_path / "gpt2", tmp_path / "squad.json"
    folder.mkdir()
    tokenizer = checkpoints.byte_files(folder, "gpt2")
    checkpoints.save(folder, "gpt2", tokenizer, max_position_embeddings=1024)
    asked = {"id": "1", "question": "What is old?", "answers": [{"text": "Rome", "answer_start": 0}]}
    paragraphs = [{"context": "Rome is old.", "qas": [asked]}]
    squad.write_text(json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]}))
    printed = output("probe", folder, "--tasks", "qa", "--lengths", 800, "--text", squad, *FEW)
    assert printed.splitlines()[1].split()[0] == "qa"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "0"], "--lengths: expected numbers above 1"),
        (["--lengths", "a,b"], "--lengths: expected numbers above 1"),
        (["--lengths", "100"], "lengths: vt: the shortest prompt has"),
        (["--tasks", "vt,needle"], "unknown --tasks 'needle'"),
        (["--tasks", "qa"], "tasks: 'qa' needs questions about a text; name a file"),
        (["--samples", "0"], "--samples: expected 1 or more, got 0"),
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--template", "text"], "template: expected {prompt} once in it, got 'text'"),
    ],
)
def test_bad_options_of_a_probe(
    train_tiny: Trained, words: list[str], message: str, complaint: Callable[..., str]
):
    options = {"--tasks": "vt", "--samples": "1"} | dict(zip(words[::2], words[1::2]))
    assert message in complaint(
        "probe", train_tiny("lm"), *(word for pair in options.items() for word in pair)
    )


def test_prompts_longer_than_the_model_are_refused(train_tiny: Trained, complaint: Callable[..., str]):
    said = complaint("probe", train_tiny("lm"), "--lengths", "128,2048", "--tasks", "vt")
    assert "lengths: expected at most 128 tokens, which the model takes, got 2048" in said


def test_only_language_models_are_probed(train_tiny: Trained, complaint: Callable[..., str]):
    assert "a run of the task 'classify', which cannot do this" in complaint("probe", train_tiny("classify"))
