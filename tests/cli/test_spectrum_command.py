"""`polyformer spectrum`, from words to table, files and complaints."""

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from polyformer.attention.mechanisms import LinformerConfig
from polyformer.cli.commands.inputs import load, token_rows
from polyformer.cli.main import main
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model

Trained = Callable[[str], Path]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        capsys.readouterr()
        assert main(["spectrum", *words]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        capsys.readouterr()
        assert main(["spectrum", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def saved(train_tiny: Trained) -> Callable[[Transformer], str]:
    """Saves a model beside a tokenizer; the folder's name."""

    def save(model: Transformer) -> str:
        model.save_pretrained("saved")
        shutil.copy(train_tiny("lm") / "tokenizer.json", "saved")
        return "saved"

    return save


def test_a_run_on_its_own_text(train_tiny: Trained, output: Callable[..., str]):
    run = train_tiny("lm")
    text = output(str(run), "--length", "16", "--texts", "3", "--out", "curves.csv")
    assert "decoder, 3 texts of 16 tokens: share of the largest 4 singular values" in text
    rows = list(csv.DictReader(Path("curves.csv").read_text().splitlines()))
    assert [float(row["share"]) for row in rows if row["index"] == "16"] == [1.0] * (len(rows) // 16)
    of_head = [float(row["share"]) for row in rows if (row["layer"], row["head"]) == ("0", "0")]
    assert of_head == sorted(of_head)
    shown = next(line.split() for line in text.split("\n") if line.split()[:1] == ["0"])
    assert abs(float(shown[1]) - of_head[3]) < 1e-4


def test_rows_are_the_text_without_padding(train_tiny: Trained):
    source = load(str(train_tiny("lm")), None, "cpu")
    first, second = token_rows(source, "text", 20, 2)
    tokenizer = source.tokenizer
    assert first[0] == second[0] == tokenizer.bos_id
    whole = "".join(f"line {i} of a small text\n" for i in range(3))
    assert whole.startswith(tokenizer.decode(first[1:] + second[1:]))
    assert len(first) == len(second) == 20


def test_files_beside_the_run(train_tiny: Trained, output: Callable[..., str]):
    pytest.importorskip("matplotlib")
    shutil.copytree(train_tiny("mlm"), "run")
    text = output("run", "--length", "12", "--texts", "1")
    assert text.endswith("\nWritten to run/spectrum.csv\nDrawn in run/spectrum.png\n")
    assert Path("run/spectrum.png").read_bytes().startswith(b"\x89PNG")
    assert output("run", "--length", "12", "--texts", "1", "--out", "new/a.svg").endswith(
        "Drawn in new/a.svg\n"
    )
    assert Path("new/a.csv").read_text() == Path("run/spectrum.csv").read_text()


@pytest.mark.parametrize("task", ["translate", "classify", "tag"])
def test_runs_of_other_tasks(task: str, train_tiny: Trained, output: Callable[..., str]):
    text = output(str(train_tiny(task)), "--length", "10", "--texts", "2", "--out", "a.csv")
    assert "encoder, 2 texts of 10 tokens" in text
    assert ("decoder, 2 texts of 10 tokens" in text) == (task == "translate")


def test_other_texts(train_tiny: Trained, output: Callable[..., str]):
    Path("other.txt").write_text("another text, of a few words")
    text = output(str(train_tiny("lm")), "--length", "10", "--data", "other.txt", "--out", "a.csv")
    assert "decoder, 3 texts of 10 tokens" in text  # 28 bytes and <eos> are three times nine and some


def test_a_preset_says_that_its_weights_are_fresh(output: Callable[..., str]):
    words = ["encoder-tiny", "--length", "16", "--texts", "1"]
    text = output(*words)
    assert text.startswith("encoder-tiny: preset with random weights; its tokens are bytes\n")
    assert output(*words) == text
    assert not list(Path().iterdir())


def test_a_saved_model_reads_the_default_text(
    saved: Callable[[Transformer], str], output: Callable[..., str]
):
    folder = saved(create_model("decoder-tiny", vocab_size=260, hidden_size=16))
    assert "decoder, 1 text of 16 tokens" in output(
        folder, "--length", "16", "--texts", "1", "--out", "a.csv"
    )


def test_no_tokenizer(complaint: Callable[..., str]):
    create_model("decoder-tiny", vocab_size=260, hidden_size=16).save_pretrained("bare")
    assert "bare: no tokenizer in this directory" in complaint("bare")


def test_no_attention_matrix(saved: Callable[[Transformer], str], complaint: Callable[..., str]):
    folder = saved(create_model("encoder-tiny", attention=LinformerConfig(), hidden_size=16))
    error = complaint(folder)
    assert "mechanism 'linformer' has no attention matrix of tokens by tokens; these have one: " in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("encoder-tiny --length 3", "--length: expected 4 or more, got 3"),
        ("encoder-tiny --texts 0", "--texts: expected 1 or more, got 0"),
        ("encoder-tiny --out a.pdf", "unknown format of --out 'a.pdf' '.pdf': did you mean '.png'"),
        ("encoder-tyni", "unknown model 'encoder-tyni': did you mean 'encoder-tiny'"),
        (".", "not a model directory .it has no config.json."),
        ("encoder-tiny --data nowhere.txt", "nowhere.txt: no such file"),
        (
            "encoder-tiny --data short.txt --length 64",
            "--length: the texts have 6 tokens in total, too few for 64",
        ),
        ("decoder-tiny --length 600", "positions"),
    ],
)
def test_wrong_words(words: str, message: str, complaint: Callable[..., str]):
    Path("short.txt").write_text("short")
    assert re.search(message, complaint(*words.split()))
    assert [path.name for path in Path().iterdir()] == ["short.txt"]
