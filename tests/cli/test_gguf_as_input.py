"""A GGUF file where a model is taken: written on, measured, converted."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import models, pre_tokenizers

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

import checkpoints  # noqa: E402

import polyformer  # noqa: E402
from gguf_files import Kind, described, tensors_of, write  # noqa: E402
from polyformer.cli.main import main  # noqa: E402
from polyformer.core.kv_cache import Int8Cache  # noqa: E402
from polyformer.data import Tokenizer, TokenizerConfig, load_tokenizer  # noqa: E402

TEXT = " ".join(checkpoints.TEXT[:12])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bpe", vocab_size=300), checkpoints.TEXT)
    saved = json.loads(tokenizer.backend.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].__getitem__)
    assert isinstance(tokenizer.backend.model, models.BPE)
    assert isinstance(tokenizer.backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if tokenizer.backend.token_to_id(t) in tokenizer.special_ids else 1 for t in tokens],
        "merges": [" ".join(pair) for pair in saved["merges"]],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }
    config = transformers.LlamaConfig(
        vocab_size=len(tokens), **checkpoints.TINY, bos_token_id=1, eos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return write(tmp_path / "m.gguf", "llama", described(config), tensors_of(model, Kind.F16), values)


def test_generate(path: Path, output: Callable[..., str]):
    model, tokenizer = polyformer.from_pretrained(path), load_tokenizer(path)
    ids = model.generate(torch.tensor([tokenizer.encode("Anna")]), max_new_tokens=5)
    text = "Anna" + ids.texts(tokenizer.decode)[0] + "\n"
    assert output("generate", path, "--prompt", "Anna", "--max-new-tokens", 5) == text
    assert output("generate", path.parent, "--prompt", "Anna", "--max-new-tokens", 5) == text
    assert polyformer.load(path, "cpu").generate("Anna", 5) + "\n" == text


def test_a_prompt_is_read_once(
    path: Path, tmp_path: Path, output: Callable[..., str], complaint: Callable[..., str]
):
    file, options = tmp_path / "s.safetensors", ("--max-new-tokens", 5)
    first, longer = "Anna reads", "Anna reads the book"
    usual = output("generate", path, "--prompt", longer, *options)
    assert output("generate", path, "--prompt", first, "--save-state", file, *options).startswith(first)
    assert output("generate", path, "--prompt", longer, "--state", file, *options) == usual
    error = complaint("generate", path, "--prompt", "The book", "--state", file)
    assert "--state: expected a text that begins with the" in error
    assert "repeat the text of --save-state" in error
    error = complaint("generate", path, "--prompt", longer, "--state", file, "--cache", "int8")
    assert "--cache: expected the policy with which" in error
    for bad in (("--draft", "lookup"), ("--num-beams", "2"), ("--save-state", tmp_path / "other")):
        assert "leave " in complaint("generate", path, "--prompt", longer, "--state", file, *bad)
    assert "expected one text" in complaint("generate", path, "a b", "c d", "--save-state", file)


def test_evaluate(path: Path, tmp_path: Path, output: Callable[..., str], complaint: Callable[..., str]):
    """Windows of 8 tokens, each token predicted once, from those before it in its window."""
    (tmp_path / "text.txt").write_text(TEXT)
    model, tokenizer = polyformer.from_pretrained(path), load_tokenizer(path)
    ids = torch.tensor(tokenizer.encode(TEXT))[:33]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, 32, 8):
            logits = model(ids[None, start : start + 8]).logits[0]
            nats += float(torch.nn.functional.cross_entropy(logits, ids[start + 1 : start + 9]) * 8)
    said = output("evaluate", path, "--data", tmp_path / "text.txt", "--length", 8, "--tokens", 32)
    assert f"{math.exp(nats / 32):.4g}"[:4] in said, said
    assert "--data is missing" in complaint("evaluate", path)
    assert "--memory-length: not available for a checkpoint" in complaint(
        "evaluate", path, "--memory-length", 3
    )


@pytest.mark.parametrize(("cache", "prompt"), [("int8", 0), ("snapkv(budget=2, window=1, kernel=1)", 4)])
def test_evaluate_through_a_cache(
    cache: str, prompt: int, path: Path, tmp_path: Path, output: Callable[..., str], monkeypatch
):
    """A policy that drops keys reads half of a window, but for the first, as a prompt."""
    (tmp_path / "text.txt").write_text(TEXT)
    model, tokenizer = polyformer.from_pretrained(path), load_tokenizer(path)
    ids, nats = torch.tensor(tokenizer.encode(TEXT))[:33], 0.0
    with torch.no_grad():
        for start in range(0, 32, 8 - prompt):
            state, before = model.new_state(cache=cache), prompt if start else 0
            if before:
                state = model(ids[None, start - before : start], state=state).state
            logits = model(ids[None, start : start + 8 - prompt], state=state).logits[0]
            targets = ids[start + 1 : start + 9 - prompt]
            nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    options = "--data", tmp_path / "text.txt", "--length", 8, "--tokens", 32
    rounded, extended = [], Int8Cache.extended
    monkeypatch.setattr(Int8Cache, "extended", lambda *call: rounded.append(0) or extended(*call))
    said = output("evaluate", path, *options, "--cache", cache)
    assert f"{math.exp(nats / 32):.4g}"[:4] in said, said
    assert bool(rounded) == (cache == "int8")
    assert bool(prompt) == (said != output("evaluate", path, *options))


def test_convert(path: Path, tmp_path: Path, output: Callable[..., str]):
    output_of = polyformer.from_pretrained(path)
    assert main(["convert", str(path), str(tmp_path / "out"), "--format", "hub"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([load_tokenizer(tmp_path / "out").encode("Anna and Tom")])
    torch.testing.assert_close(output_of(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_converted_model_starts_texts_as_the_file_does(path: Path, tmp_path: Path):
    """With a memory it looks like a model that was trained here, whose texts begin with <bos>."""
    assert main(["convert", str(path), str(tmp_path / "out"), "--memory", "sinks(first=2, length=30)"]) == 0
    file, converted = (polyformer.load(folder, "cpu").task for folder in (path, tmp_path / "out"))
    assert converted.start("Anna") == file.start("Anna") == load_tokenizer(path).encode("Anna")
    assert converted.start("") == file.start("")


COMMANDS = {
    "audit": ["--checks", "batch size"],
    "show": [],
    "embed": ["TEXT", "--pooling", "mean", "--out", "OUT.parquet"],
    "probe": ["--lengths", "450", "--samples", "1", "--tasks", "niah_single_1", "--max-new-tokens", "1"],
    "explore": ["Anna flew", "--out", "OUT.html"],
    "ablate": ["--text", "TEXT", "--length", "16", "--texts", "1", "--by", "zero"],
    "spectrum": ["--data", "TEXT", "--length", "16", "--texts", "1", "--out", "OUT.csv"],
    "prompt": ["QUESTIONS", "--out", "OUT.jsonl"],
    "generate": ["--max-new-tokens", "1"],
    "evaluate": ["--data", "TEXT", "--length", "8", "--tokens", "32"],
    "datastore": ["TEXT", "--out", "OUT"],
}
"""Commands that take a model, with their other arguments."""


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.nightly) if name == "show" else name for name in COMMANDS],
)
def test_every_command_takes_a_file_its_folder_and_a_folder_of_the_hub(
    command: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.txt").write_text(TEXT * 4)
    (tmp_path / "questions.jsonl").write_text(
        '{"input": "Anna", "target": "Tom", "choices": ["Tom", "Oslo"]}\n'
    )
    alone, hub = tmp_path / "alone", tmp_path / "hub"
    alone.mkdir()
    (alone / path.name).write_bytes(path.read_bytes())
    polyformer.from_pretrained(path).save_pretrained(hub, format="hub")
    load_tokenizer(path).save(hub)
    for number, source in enumerate((path, alone, hub)):
        names = {"TEXT": tmp_path / "text.txt", "QUESTIONS": tmp_path / "questions.jsonl"}
        words = [
            str(names.get(word, word.replace("OUT", f"{tmp_path}/{number}"))) for word in COMMANDS[command]
        ]
        action = ["build"] if command == "datastore" else []
        assert main([command, *action, str(source), *words]) in (0, 1), (source, capsys.readouterr().err)
