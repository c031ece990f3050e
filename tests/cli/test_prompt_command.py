"""`polyformer prompt`: questions of both kinds, by runs and checkpoints, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch

from polyformer.applications.prompting import Continuation, log_likelihoods_definition
from polyformer.training.recipes.run import Run

Trained = Callable[[str], Path]
ROWS = [{"input": f"line {i}", "target": ("of", "no")[i % 2], "choices": ["of", "no"]} for i in range(9)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_choices_are_scored_behind_the_demonstrations(
    train_tiny: Trained, file: Path, tmp_path: Path, output: Callable[..., str]
):
    out = tmp_path / "answers.jsonl"
    template = ["--template", r"{input}\t{target}", "--separator", ";"]
    printed = output("prompt", train_tiny("lm"), file, "--shots", 2, *template, "--out", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 7
    asked = {record["input"] for record in records}
    shown = [row for row in ROWS if row["input"] not in asked]
    run = Run.open(train_tiny("lm"))
    tokenizer, model = run.tokenizer, run.model("cpu")
    first = records[0]
    scores = []
    for order in (shown, shown[::-1]):
        before = "".join(f"{row['input']}\t{row['target']};" for row in order) + first["input"]
        prompt = [tokenizer.bos_id, *tokenizer.encode(before + "\t")]
        rows = [Continuation([*prompt, *tokenizer.encode(word)], len(prompt) - 1) for word in ("of", "no")]
        scores.append(log_likelihoods_definition(model, rows))
    assert [*first["scores"].values()] in [pytest.approx(expected, rel=1e-4) for expected in scores]
    assert first["answer"] == max(first["scores"], key=first["scores"].__getitem__)
    right = sum(record["answer"] == record["target"] for record in records)
    assert f"{right / 7:.4g}" in printed
    assert "majority" in printed


def test_answers_are_written_as_by_generate(train_tiny: Trained, tmp_path: Path, output: Callable[..., str]):
    """Those of a batch too; nothing is scored where no answer is known."""
    path = tmp_path / "questions.txt"
    path.write_text("line 1\nline 1 of a small\n")
    words = "--template", "{input}{target}", "--max-new-tokens", 6, "--stop", ""
    answers = output("prompt", train_tiny("lm"), path, *words).splitlines()
    for question, answer in zip(path.read_text().splitlines(), answers, strict=True):
        text = output("generate", train_tiny("lm"), "--prompt", question, "--max-new-tokens", 6)
        assert " ".join(text.removeprefix(question).split()) == answer


def test_a_checkpoint(tmp_path: Path, file: Path, output: Callable[..., str]):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    checkpoints.save(folder, "gpt2", checkpoints.byte_files(folder, "gpt2"))
    first = output("prompt", folder, file, "--shots", 1, "--limit", 3, "--normalize", "bytes")
    assert len(first.splitlines()) == 5
    assert first == output("prompt", folder, file, "--shots", 1, "--limit", 3, "--normalize", "bytes")
    torch.manual_seed(1)  # no global random state is read
    assert first == output("prompt", folder, file, "--shots", 1, "--limit", 3, "--normalize", "bytes")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shots", "-1"], "--shots: expected 0 or more, got -1"),
        (["--limit", "0"], "--limit: expected 1 or more, got 0"),
        (["--shots", "9"], "shots: 9 of 9 rows leave no question"),
        (["--shots", "10"], "shots: expected at most 9, the number of rows"),
        (["--template", "{input}"], "template: expected {input} once"),
        (["--targets", "[a]"], "--targets: expected a mapping, as in '{0: negative"),
        (["--targets", "{a: b"], "--targets, line 1: not YAML"),
        (["--choices", "[a]"], "--choices: expected two or more different choices, got '[a]'"),
        (
            ["--columns", "{answer: b}"],
            "--columns: expected names for input, target or choices, got 'answer'",
        ),
        (["--format", "xml"], "xml"),
        (["--normalize", "words"], "--normalize: expected 'none' or 'tokens' or 'bytes'"),
        (["--examples", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_shots_templates_and_columns_that_do_not_fit_are_refused(
    train_tiny: Trained, file: Path, words: list[str], message: str, complaint: Callable[..., str]
):
    assert message in complaint("prompt", train_tiny("lm"), file, *words)


def test_a_file_of_answers_is_not_replaced(
    train_tiny: Trained, file: Path, tmp_path: Path, complaint: Callable[..., str]
):
    (tmp_path / "old.jsonl").write_text("kept")
    assert "old.jsonl already exists" in complaint(
        "prompt", train_tiny("lm"), file, "--out", tmp_path / "old.jsonl"
    )
    assert (tmp_path / "old.jsonl").read_text() == "kept"
    assert "expected another file than FILE" in complaint(
        "prompt", train_tiny("lm"), file, "--examples", file
    )


def test_other_models_and_longer_prompts(
    train_tiny: Trained, file: Path, tmp_path: Path, complaint: Callable[..., str]
):
    assert "a run of the task 'classify', which cannot do this" in complaint(
        "prompt", train_tiny("classify"), file
    )
    rows = [*ROWS, {"input": "long " * 200}]
    file.write_text("".join(json.dumps({**row, "choices": ["of", "no"]}) + "\n" for row in rows))
    assert "demonstrations has" in complaint("prompt", train_tiny("lm"), file)
    file.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"input": "a"}) + "\n")
    assert "either all or no questions may have choices" in complaint("prompt", train_tiny("lm"), file)
