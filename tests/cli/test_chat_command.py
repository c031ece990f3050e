"""`polyformer chat` and `polyformer generate --chat`: a script of messages, and what a terminal shows."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import polyformer
from chat_models import TINY, chat_folder, chat_tokenizer
from chat_templates import CHATML, turn
from polyformer.cli.commands import chat as command
from polyformer.cli.main import main
from polyformer.data import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """`talk(text, *words)`: the status, output and errors of the command for this standard input."""

    def run(text: str, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capsys.readouterr()
        status = main(["chat", *map(str, words), "--device", "cpu", "--max-new-tokens", "6"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_script_of_messages(folder: Path, tmp_path: Path, talk: Callable[..., tuple]):
    model, file = polyformer.load(folder, "cpu"), tmp_path / "chat.jsonl"
    conversation = model.conversation("Be brief.", max_new_tokens=6)
    first, second = conversation.reply("Anna"), conversation.reply("Tom /reset")
    other = model.chat([turn("system", "Be long."), turn("user", "Oslo")], max_new_tokens=6)
    text = f"Anna\n\nTom /reset\n/save {file}\n/system Be long.\n/reset\nOslo\n/quit\nParis\n"
    status, out, err = talk(text, folder, "--system", "Be brief.")
    assert (status, out) == (0, f"{first}\n{second}\n{other}\n")
    assert err.endswith(f"5 messages in {file}\n")
    messages = [json.loads(line) for line in file.read_text().splitlines()]
    assert messages == conversation.messages


def test_errors_end_a_script(folder: Path, tmp_path: Path, talk: Callable[..., tuple]):
    assert talk("/help\nAnna\n", folder)[::2] == (
        2,
        "polyformer: error: '/help': unknown command; expected /system, /reset, /save, /quit, or a message "
        "without a slash\n",
    )
    assert "expected the name of a file" in talk("/save\n", folder)[2]
    assert "expected a file, got the directory" in talk(f"/save {tmp_path}\n", folder)[2]
    bare = chat_folder(tmp_path / "bare", template=None)
    assert "no chat template" in talk("Anna\n", bare)[2]
    broken = chat_folder(tmp_path / "broken", template="{{ raise_exception('only images') }}")
    assert "chat template: only images" in talk("Anna\n", broken)[2]
    assert "temperature" in talk("Anna\n", folder, "--temperature", "-1")[2]


def test_a_terminal_goes_on_after_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = iter(["/what", "", "Anna"])

    def asked(prompt: str) -> str:
        assert prompt == command.PROMPT
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", asked)
    assert main(["chat", str(folder), "--device", "cpu", "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    reply = polyformer.load(folder, "cpu").chat([turn("user", "Anna")], max_new_tokens=5)
    assert captured.out == f"{reply}\n\n"
    assert "'/what': unknown command" in captured.err


@pytest.mark.parametrize("option", [("--memory", "sinks(first=1, length=2)"), ("--cache", "h2o(budget=2)")])
def test_bounded_caches(option: tuple[str, str], folder: Path, talk: Callable[..., tuple]):
    status, out, _ = talk("Anna and Tom\nOslo\n", folder, *option)
    assert status == 0
    assert out != talk("Anna and Tom\nOslo\n", folder)[1]


def test_generate_takes_messages(folder: Path, output: Callable[..., str]):
    model = polyformer.load(folder, "cpu")
    replies = [model.chat([turn("user", text)], max_new_tokens=6) for text in ("Anna", "Tom")]
    words = ("generate", folder, "--chat", "Anna", "Tom", "--max-new-tokens", 6)
    assert output(*words) == f"{replies[0]}\n\n{replies[1]}\n"
    beams = model.chat([turn("user", "Anna")], max_new_tokens=6, num_beams=2)
    assert (
        output("generate", folder, "--chat", "Anna", "--max-new-tokens", 6, "--num-beams", 2) == beams + "\n"
    )


def test_conversion_keeps_the_template(folder: Path, tmp_path: Path, output: Callable[..., str]):
    for format in ("polyformer", "hub", "wrapped"):
        out = tmp_path / format
        assert main(["convert", str(folder), str(out), "--format", format]) == 0
        chat = load_tokenizer(out).chat
        assert chat is not None
        assert dict(chat.sources) == {"default": CHATML}
        assert (out / "chat_template.jinja").read_text() == CHATML
    again = polyformer.load(tmp_path / "polyformer", "cpu")
    messages = [turn("user", "Anna")]
    expected = polyformer.load(folder, "cpu").chat(messages, max_new_tokens=6)
    assert again.chat(messages, max_new_tokens=6) == expected


def test_the_template_of_a_gguf_file(tmp_path: Path):
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    import gguf

    from gguf_files import described, tensors_of

    tokenizer = chat_tokenizer()
    saved = json.loads(tokenizer.backend.to_str())
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    config = transformers.LlamaConfig(vocab_size=len(tokens), **TINY)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in described(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    special = tokenizer.special_ids
    writer.add_token_types([3 if vocabulary[token] in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_chat_template([{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T"}])
    for name, (tensor, kind) in tensors_of(transformers.LlamaForCausalLM(config)).items():
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    chat = load_tokenizer(tmp_path / "m.gguf").chat
    assert chat is not None
    assert dict(chat.sources) == {"default": CHATML, "tool_use": "T"}
    assert main(["convert", str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    assert load_tokenizer(tmp_path / "out").chat == chat
    assert polyformer.load(tmp_path / "out", "cpu").chat([turn("user", "Anna")], max_new_tokens=4) is not None
