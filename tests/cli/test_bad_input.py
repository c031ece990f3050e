"""Whatever is wrong with the input: one line on stderr that says so, and exit status 2."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forking import start_python
from polyformer.cli.main import main
from polyformer.core import files

Trained = Callable[[str], Path]
CLASSIFY = "--task.kind classify --model encoder-tiny"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "unknown command 'trian': did you mean 'train'"),
        ("train multi30", "unknown recipe 'multi30': did you mean 'multi30k'"),
        ("train nowhere.yaml", "no such file: nowhere.yaml"),
        ("train --data nowhere.txt", "nowhere.txt: no such file"),
        ("train --model decoder-tyni", "unknown model 'decoder-tyni': did you mean 'decoder-tiny'"),
        ("train --steps -1", "steps: expected 1 or more, got -1"),
        ("train --steps 0", "steps: expected 1 or more, got 0"),
        ("train --seed -1", "seed: expected 0 or more, got -1"),
        ("train --training.stesp 3", "unknown option of training 'stesp': did you mean 'steps'"),
        ("train --trainin.steps 3", "unknown option of Recipe 'trainin': did you mean 'training'"),
        ("train --optimizer.lr fast", "optimizer.lr: expected float, got 'fast'"),
        ("train --training.clip [1]", r"training.clip: expected float, got \[1\]"),
        ("train --task.kind lmm", "unknown kind of task 'lmm'"),
        ("train --model.hidden_sizes 3", "option of ModelConfig 'hidden_sizes': did you mean 'hidden_size'"),
        ("train --model encoder-tiny", "model: this task needs a decoder model, got one with an encoder"),
        ("train --resume nowhere", "nowhere: no such directory"),
        ("train default --resume nowhere", "--resume: the run defines recipe and folder"),
        ("train sst2", "sst2: name the directory with its data .train.tsv. with --data DIR"),
        ("train sst2 --data .", "test.tsv: no such file"),
        ("evaluate nowhere", "nowhere: no such directory"),
        ("evaluate .", "not a run .it has no recipe.yaml."),
        ("generate .", "not a model directory .it has no config.json."),
        ("show .", "not a model directory .it has no config.json."),
        ("show bert-bse", "unknown model 'bert-bse': did you mean 'bert-base'"),
        ("list decodre-tiny", "unknown name 'decodre-tiny': did you mean 'decoder-tiny'"),
        ("reproduce warmpu", "unknown claim 'warmpu'"),
        ("bench training --layrs 3", "unknown option of TrainingBench 'layrs': did you mean 'layers'"),
        ("generate x --max-new-tokens 1000000000", "--max-new-tokens: expected at most 1048576"),
        ("explore x y --generate 1000000000", "--generate: expected at most 1048576, got 1000000000"),
        ("generate x --num-beams 1000000000", "--num-beams: expected at most 16777216, got 1000000000"),
        ("classify", "RUN is missing; see polyformer classify --help"),
        ("train --devic cpu", "unknown option '--devic': did you mean '--device'"),
        ("classify a b --pair", "--pair: expected a value after it"),
    ],
)
def test_wrong_words(words: str, message: str, complaint: Callable[..., str]):
    assert re.search(message, complaint(*words.split()))
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("empty.txt", "", "", "empty.txt: empty"),
        ("broken.txt.gz", "\x1f\x8b", "", "broken.txt.gz"),
        ("a.csv", "phrase,mood\nfine,5\n", CLASSIFY, "no column 'text'.*'phrase', 'mood'"),
        (
            "a.csv",
            "text,label\nfine,5\n",
            f"{CLASSIFY} --data.validation_fraction 0",
            "every training text has the same one, '5'",
        ),
        ("a.jsonl", '{"text": 3}\n', "", "column 'text' holds 3, expected text"),
        ("a.unknown", "text", "", "its name does not tell its format"),
    ],
)
def test_wrong_files(name: str, content: str, words: str, message: str, complaint: Callable[..., str]):
    Path(name).write_bytes(content.encode("latin-1"))
    assert re.search(message, complaint("train", "--data", name, *words.split()))


def test_a_label_unseen_in_training(train_tiny: Trained, complaint: Callable[..., str]):
    Path("other.csv").write_text("text,label\nfine film,great\n")
    error = complaint("evaluate", str(train_tiny("classify")), "--data", "other.csv")
    assert "label: 'great' was not seen in training, which had 'neg', 'pos'" in error


def test_a_text_longer_than_the_positions(
    train_tiny: Trained, complaint: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    assert main(["classify", str(train_tiny("classify")), "long " * 200]) == 0
    assert capsys.readouterr().err == "polyformer: 1 of 1 texts are cut to 512 tokens\n"
    error = complaint("generate", str(train_tiny("lm")), "--prompt", "long " * 100)
    assert re.search("positions", error)


def test_a_run_of_another_task(train_tiny: Trained, complaint: Callable[..., str]):
    assert "a run of the task 'lm', which cannot do this" in complaint(
        "classify", str(train_tiny("lm")), "text"
    )


def test_no_text(train_tiny: Trained, complaint: Callable[..., str]):
    assert "TEXT: expected a text, got only white space" in complaint(
        "classify", str(train_tiny("classify")), " "
    )


def test_sampling_options_are_checked(train_tiny: Trained, complaint: Callable[..., str]):
    assert "temperature: expected a number above 0, got 0.0" in complaint(
        "generate", str(train_tiny("lm")), "--temperature", "0"
    )


def test_a_folder_that_holds_a_run(train_tiny: Trained, complaint: Callable[..., str]):
    assert "already holds a run; continue it with --resume" in complaint(
        "train", "--out", str(train_tiny("lm"))
    )


def test_damaged_weights_are_named(train_tiny: Trained, complaint: Callable[..., str]):
    import shutil

    shutil.copytree(train_tiny("lm"), "copy")
    weights = Path("copy/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors is damaged" in complaint("generate", "copy")


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch, complaint: Callable[..., str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["train"], ["train", "--training.engine.device", "cuda"]):
        chosen = words if len(words) > 1 else [*words, "--device", "cuda"]
        assert "device: 'cuda' was requested, but torch finds no CUDA device" in complaint(*chosen)


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, complaint: Callable[..., str]):
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "_sync", full)
    Path("a.txt").write_text("some words to read\n" * 50)
    assert "no space left" in complaint(
        "train", "--data", "a.txt", "--tokenizer.algorithm", "bytes", "--steps", "1"
    )


def start(*words: str) -> "subprocess.Popen[str]":
    """An interpreter of its own: what it takes to say these is too little to import torch."""
    return subprocess.Popen(
        [sys.executable, "-m", "polyformer.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_real_process_exits_with_2_and_one_line():
    process = start("train", "--steps", "many")
    out, error = process.communicate()
    assert process.returncode == 2
    assert (out, error) == ("", "polyformer: error: --steps: expected int, got 'many'\n")


def test_an_interrupted_training_says_how_to_go_on(tmp_path: Path):
    Path("a.txt").write_text("some words to read\n" * 50)
    words = ["--data", "a.txt", "--tokenizer.algorithm", "bytes", "--training.saving.checkpoint_every", "1"]
    process = start_python(
        *("-m", "polyformer", "train"),
        *words,
        "--steps",
        "100000",
        "--task.row_length",
        "8",
        "--task.batch_tokens",
        "8",
        "--device",
        "cpu",
    )
    while process.poll() is None and not list(tmp_path.glob("runs/default-1/checkpoints/step-*")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    ended = process.ended()
    assert ended.returncode == 130
    first, second = ended.stderr.strip().splitlines()
    assert first == "polyformer: SIGINT: stopping after this step (again to stop immediately)"
    assert re.fullmatch(
        r"polyformer: stopped by SIGINT at step \d+, of which a checkpoint is written; "
        r"resume with: polyformer train --resume runs/default-1",
        second,
    )


def test_a_broken_pipe_is_silent():
    process = start("--help")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate()[1] == ""
    assert process.returncode == 141
