"""The examples run, and do what they say; examples/own-member has tests of its own (test_own_member.py)."""

import json
import math
import re
import runpy
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from forking import run_python, start_python
from polyformer.data import TokenizerConfig
from polyformer.data.sources.libraries import default_documents
from polyformer.data.tokenizers import build_tokenizer, load_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the example prints, run in this process."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def numbers(pattern: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(pattern, text)]


def test_own_mask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = run("own_mask.py", monkeypatch, capsys)
    (difference,) = numbers(r"from the definition: (\S+)", text)
    assert difference < 1e-5
    assert "pairs that are seen: 3.1%" in text


def test_own_position():
    """In a process of its own: it registers a member."""
    done = run_python("-W", "error", EXAMPLES / "own_position.py")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = numbers(r"loss (\S+)", done.stdout)
    assert losses[-1] < losses[0] - 0.3
    assert numbers(r"'(\S+)'", done.stdout) != [0.5] * 4, "the slopes were not trained"


def test_own_mechanism(tmp_path: Path):
    """What it prints, and the audit of the model that it saves, with more tokens than its window."""
    done = run_python("-W", "error", EXAMPLES / "own_mechanism.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"(\w+) changes nothing: True", done.stdout) == ["packing", "padding", "cache"]
    words = "audit", "sigmoid-model", "--length", "40", "--import", EXAMPLES / "own_mechanism.py"
    audit = run_python("-m", "polyformer", *words, cwd=tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr[-3000:]
    assert "0 findings, 0 accepted, 1 not applicable" in audit.stdout


def test_dependency_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = run("dependency_tree.py", monkeypatch, capsys)
    without, with_tree = numbers(r": (\S+)% of the words", text)
    assert with_tree > 90 > 50 > without, "the head of a word stands anywhere"
    words = "1 the _ DET _ _ 2 det _ _|2 cat _ NOUN _ _ 3 nsubj _ _|3 sleeps _ VERB _ _ 0 root _ _"
    tree = "# text = the cat sleeps\n" + words.replace(" ", "\t").replace("|", "\n") + "\n\n"
    (tmp_path / "a.conllu").write_text(tree * 20)
    assert "18 sentences to train on, 2 to test on" in run(
        "dependency_tree.py", monkeypatch, capsys, str(tmp_path / "a.conllu")
    )


def test_plain_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = run("plain_loop.py", monkeypatch, capsys, "60")
    first, last = numbers(r"held out (\S+)", text)
    assert last < first - 0.1
    assert "\nThe " in text


def test_induction_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    polyformer.create_model("decoder-tiny", vocab_size=120).save_pretrained(tmp_path)
    text = run("induction_heads.py", monkeypatch, capsys, str(tmp_path), "2")
    scores = numbers(r"score (\S+)", text)
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[0] < 0.1, "an untrained head attends to all tokens alike"
    assert len(numbers(r"second (\S+): without", text)) == 11


def test_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.txt").write_text("\n\n".join(default_documents()[:20]), encoding="utf-8")
    out = tmp_path / "run"
    text = run("own_data.py", monkeypatch, capsys, str(tmp_path / "mine.txt"), str(out), "30")
    (loss,) = numbers(r"validation loss: (\S+)", text)
    assert loss < 6.0 < math.log(1000)
    assert "\nThe " in text
    assert polyformer.from_pretrained(out).config.vocab_size <= 1000


def test_plain_transformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Its model has tests of its own (test_plain_transformer.py)."""
    text = run("plain_transformer.py", monkeypatch, capsys, "150")
    first, _, last = numbers(r"loss (\S+)", text)
    assert last < first - 1
    (right,) = numbers(r"(\d+) of 100 new sentences", text)
    assert right > 10
    assert len(re.findall(r"(?m)^\w.* -> \w", text)) == 5


def test_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = run("trainer.py", monkeypatch, capsys, "20")
    (losses,) = re.findall(r"held-out loss: (\S+) before, (\S+) after 20 steps", text)
    assert float(losses[1]) < float(losses[0]) - 0.5
    assert text.split()[-2:] == ["PolyformerForCausalLM", "Transformer"]


@pytest.mark.filterwarnings("ignore::FutureWarning:lightning", "ignore::UserWarning:lightning")
def test_lightning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (accuracy,) = numbers(r"accuracy: (\S+)", run("lightning_module.py", monkeypatch, capsys, "80"))
    assert accuracy > 0.65


def test_embeddings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = run("embeddings.py", monkeypatch, capsys)
    losses = numbers(r"loss (\S+)", text)
    assert losses[-1] < losses[0] - 0.5
    cosines = numbers(r"(?m)^(\d\.\d\d)  ", text)
    assert len(cosines) == 3
    assert cosines == sorted(cosines, reverse=True)


def test_explorer_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its cells run one after the other, and the last line of one is what a notebook shows."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "explorer.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    shown = names["page"]._repr_html_()
    assert "<iframe" in shown
    assert "srcdoc" in shown
    assert (tmp_path / "attention.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its tokenizer, untrained."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=400), default_documents()[:5])
    torch.manual_seed(0)
    polyformer.create_model("decoder-tiny", vocab_size=len(tokenizer), position="rope").save_pretrained(path)
    tokenizer.save(path)
    return path


def written(folder: Path, prompt: str, **settings: Any) -> str:
    tokenizer = load_tokenizer(folder)
    model = polyformer.from_pretrained(folder).eval()
    ids = torch.tensor([tokenizer.encode(prompt)])
    return model.generate(ids, decode=tokenizer.decode, **settings).texts(tokenizer.decode)[0]


def test_stream(folder: Path):
    example = runpy.run_path(str(EXAMPLES / "stream.py"))
    model, tokenizer = polyformer.from_pretrained(folder).eval(), load_tokenizer(folder)
    pieces = list(example["pieces"](model, tokenizer, "while", max_new_tokens=24))
    assert "".join(pieces) == written(folder, "while", max_new_tokens=24)
    assert len(pieces) > 8, "the text comes at once"
    with pytest.raises(polyformer.InputError, match="max_new_tokens"):
        list(example["pieces"](model, tokenizer, "while", max_new_tokens=-1))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The address of the example, served by uvicorn."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "uvicorn", "--app-dir", EXAMPLES, "serve:app", "--port", port]
    program = start_python(*words, env={"MODEL": str(folder)})
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except urllib.error.URLError:
                assert program.poll() is None, program.ended().stderr[-3000:]
                time.sleep(0.1)
        yield address
    finally:
        program.kill_all()


def ask(address: str, path: str, **request: Any) -> dict[str, Any]:
    body = json.dumps(request).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", body, headers)) as reply:
        return json.load(reply)


def test_serve(folder: Path, server: str):
    """OpenAI's paths (tests/applications/serving) and one more."""
    request = {"model": folder.name, "prompt": "for 0 in", "max_tokens": 8}
    reply = ask(server, "/v1/completions", **request)
    assert reply["choices"][0]["text"] == written(folder, "for 0 in", max_new_tokens=8)
    count = len(load_tokenizer(folder).encode("for 0 in"))
    assert ask(server, "/count", text="for 0 in") == {"tokens": count}
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(server, "/count", text=5)
    assert error.value.code == 400
    assert b"text: " in error.value.read()
