"""`polyformer evaluate` under torchrun: the numbers of one process, said once, after what that left."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import byte_files, save

from launching import torchrun
from polyformer.cli.commands.evaluate import EvaluateOptions, measure_checkpoint, measure_run
from polyformer.cli.commands.processes import workers
from polyformer.cli.main import main

WORDS = "".join(f"{i} small words and {i % 7} more of them stand here\n" for i in range(40))
PAIRS = "source\ttarget\n" + "".join(f"word {i}\tWort {i}\n" for i in range(7))


def measure(run: str, data: str) -> EvaluateOptions:
    """What is asked of each: several batches, of unequal sizes."""
    progress = f"{run}-progress"
    if run.endswith("gpt2"):
        return EvaluateOptions(run=run, data=data, device="cpu", length=16, progress=progress)
    return EvaluateOptions(run=run, data=data, device="cpu", progress=progress)


def test_the_same_numbers_said_once(
    train_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpt2").mkdir()
    save(tmp_path / "gpt2", "gpt2", byte_files(tmp_path / "gpt2", "gpt2"))
    (tmp_path / "words.txt").write_text(WORDS * 30)
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    (tmp_path / "films.csv").write_text("text,label\n" + "good film,pos\na bad film,pos\nbad,neg\n" * 5)
    lm, films, pairs = train_tiny("lm"), train_tiny("classify"), train_tiny("translate")
    cases = [
        *(tmp_path / "gpt2", tmp_path / "words.txt", lm, tmp_path / "words.txt"),
        *(films, tmp_path / "films.csv", pairs, tmp_path / "pairs.tsv"),
    ]
    capsys.readouterr()
    for run, data in zip(cases[::2], cases[1::2]):
        length = ["--length", "16"] if run.name == "gpt2" else []
        command = ["evaluate", str(run), "--data", str(data), "--device", "cpu", *length]
        assert main([*command, "--progress", f"{run}-progress"]) == 0
        kept = Path(f"{run}-progress/process-0.jsonl")
        lines = kept.read_text().splitlines(keepends=True)
        kept.write_text("".join(lines[: len(lines) // 2]))
    expected = capsys.readouterr().out
    ended = torchrun(__file__, *cases)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout == expected
    assert "of 2: " in ended.stderr
    assert " batches and texts in " in ended.stderr
    assert expected.count("bleu") == expected.count("accuracy") == 1


def test_a_datastore_is_searched_by_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["evaluate", "run", "--datastore", "store", "--data", "text.txt"]) == 2
    assert "--datastore: requires a single process; run it without torchrun" in capsys.readouterr().err


if __name__ == "__main__":
    with workers("cpu") as shared:
        assert shared.world == 2
        assert shared.each(lambda items: [10 * item for item in items], range(5)) == [0, 10, 20, 30, 40]
        for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
            options = measure(name, path)
            if not measure_checkpoint(options, shared):
                measure_run(options, shared)
