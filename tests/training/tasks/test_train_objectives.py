"""Every objective trains, resumes its tokenizer and is evaluated from the command line."""

from pathlib import Path

import pytest

from polyformer.cli.main import main

TEXT = "".join(f"Line {i} of a text. It has a few words! Has it?\n\n" for i in range(60))
PAIRS = "source\ttarget\n" + "".join(f"word {i}\tWort {i}\n" for i in range(20))
QUESTIONS = "".join(
    f'{{"question": "Where is {i}?", "context": "Here is {i}.", '
    '"answers": {"text": ["Here"], "answer_start": [0]}}\n'
    for i in range(20)
)
TASKS = {
    "nsp": ("encoder-tiny", TEXT, "sentence accuracy"),
    "sop": ("encoder-tiny", TEXT, "sentence accuracy"),
    "tlm": ("encoder-tiny", PAIRS, "perplexity"),
    "span_corruption": ("transformer-tiny", TEXT, "perplexity"),
    "denoise": ("transformer-tiny", TEXT, "perplexity"),
    "qa": ("encoder-tiny", QUESTIONS, "exact match"),
}


@pytest.mark.parametrize("kind", TASKS)
def test_train_and_evaluate(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, text, metric = TASKS[kind]
    name = {"tlm": "pairs.tsv", "qa": "questions.jsonl"}.get(kind, "text.txt")
    data, out = tmp_path / name, tmp_path / "run"
    data.write_text(text)
    command = ["train", "--task.kind", kind, "--model", model, "--data", str(data), "--out", str(out)]
    command += [
        "--steps",
        "2",
        "--device",
        "cpu",
        "--tokenizer.algorithm",
        "bytes",
        "--model.hidden_size",
        "16",
    ]
    if text is TEXT:
        command += ["--data.format", "paragraphs"]
    assert main(command) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    assert metric in " ".join(capsys.readouterr().out.split())
