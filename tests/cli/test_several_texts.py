"""Commands that take a text take several, answer them in order, and as from standard input."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyformer.cli.commands.inputs import LINES, input_lines
from polyformer.cli.main import main
from polyformer.core.errors import InputError

Trained = Callable[[str], Path]


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (["translate", "--num-beams", "1"], ["word 3", "word 4", "word 5"]),
        (["classify"], ["good film", "bad film", "a film"]),
        (["tag"], ["Anna sleeps", "in New York"]),
    ],
)
def test_texts_are_answered_in_order_as_lines_are(
    command: list[str], texts: list[str], train_tiny: Trained, output: Callable[..., str], monkeypatch
):
    name, *words = command
    run = train_tiny(name)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{text}\n" for text in texts)))
    lines = output(name, run, *words)
    assert output(name, run, *texts, *words) == lines
    assert lines.startswith(output(name, run, texts[0], *words))


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (["translate", "--num-beams", "1"], ["word 3", "word 4"]),
        (["classify"], ["good film", "bad film"]),
        (["tag"], ["Anna sleeps", "in New York"]),
    ],
)
def test_a_file_is_one_text_or_a_text_per_line(
    command: list[str],
    lines: list[str],
    train_tiny: Trained,
    output: Callable[..., str],
    complaint: Callable[..., str],
    tmp_path: Path,
    monkeypatch,
):
    name, *words = command
    run, file = train_tiny(name), tmp_path / "texts.txt"
    content = "".join(f"{line}\n" for line in lines)
    file.write_text(content)
    whole, each = output(name, run, content.rstrip(), *words), output(name, run, *lines, *words)
    assert output(name, *words, "--file", file, run) == whole != each
    assert output(name, run, "--file", file, *words, "--lines") == each
    monkeypatch.setattr(sys, "stdin", io.StringIO(content))
    assert output(name, run, "--file", "-", *words) == whole
    monkeypatch.setattr(sys, "stdin", io.StringIO(content))
    assert output(name, run, "--file", "-", "--lines", *words) == each
    error = complaint(name, run, str(file), *words)
    assert "TEXT: expected a text, got the name of a file" in error
    assert f"--file {file}" in error
    assert "--file: not available with texts as arguments" in complaint(name, run, "a", "--file", file)
    assert "--lines: not available with texts as arguments" in complaint(name, run, "a", "--lines")


def test_standard_input_of_several_lines_is_explained(train_tiny: Trained, capsys, monkeypatch):
    run, note = str(train_tiny("classify")), "polyformer: each line of standard input is a text"
    for text, words, noted in (
        ("good film\nbad film\n", [], True),
        ("good film\nbad film\n", ["--lines"], False),
        ("good film\n", [], False),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["classify", run, "--device", "cpu", *words]) == 0
        captured = capsys.readouterr()
        assert len(captured.out.splitlines()) == len(text.splitlines())
        assert (captured.err.startswith(note), bool(captured.err)) == (noted, noted)


def test_a_file_is_continued(
    train_tiny: Trained, output: Callable[..., str], complaint: Callable[..., str], tmp_path: Path
):
    run, words, file = train_tiny("lm"), ["--max-new-tokens", 3], tmp_path / "texts.txt"
    file.write_text("line 1\na small\n")
    whole = output("generate", run, "--prompt", "line 1\na small", *words)
    assert output("generate", run, "--file", file, *words) == whole
    each = output("generate", run, "--prompt", "line 1", "a small", *words)
    assert output("generate", run, "--file", file, "--lines", *words) == each
    assert "--prompt: expected a text, got the name of a file" in complaint("generate", run, "--prompt", file)
    assert "TEXT: expected a text, got the name of a file" in complaint("generate", run, *words, file)
    assert "--prompt: not available with texts" in complaint("generate", run, "a", "--prompt", "b")
    for texts, name in ((["a"], "texts as arguments"), (["--prompt", "a"], "--prompt")):
        assert f"--file: not available with {name}" in complaint("generate", run, *texts, "--file", file)
    assert "--lines: requires --file" in complaint("generate", run, "--lines")
    assert "--file: " in complaint("generate", run, "--file", tmp_path / "none.txt")


def test_an_explored_text_is_no_file(train_tiny: Trained, complaint: Callable[..., str], tmp_path: Path):
    (tmp_path / "text.txt").write_text("a text")
    error = complaint("explore", train_tiny("lm"), tmp_path / "text.txt", "--out", tmp_path / "page.html")
    assert "TEXT: expected a text, got the name of a file" in error


def test_prompts_are_continued_in_order(train_tiny: Trained, output: Callable[..., str]):
    run, words = train_tiny("lm"), ["--max-new-tokens", 6, "--temperature", 0.9, "--seed", 3]
    texts = [output("generate", run, "--prompt", prompt, *words) for prompt in ("line 1", "a small")]
    assert output("generate", run, "--prompt", "line 1", "a small", *words) == "\n".join(texts)
    assert output("generate", *words, run, "line 1", "a small") == "\n".join(texts)
    beams = output("generate", run, "--prompt", "line", "a", "--num-beams", 2, "--max-new-tokens", 3)
    assert [text.split()[0][:1] for text in beams.split("\n\n")] == ["l", "a"]


def test_a_cache_policy_is_followed(
    train_tiny: Trained, output: Callable[..., str], complaint: Callable[..., str]
):
    words = "generate", train_tiny("lm"), "--prompt", "line " * 12, "--max-new-tokens", 6
    assert output(*words, "--cache", "snapkv(budget=200)") == output(*words)
    assert "budget: expected more keys than the 32" in complaint(*words, "--cache", "snapkv(budget=8)")


def test_many_texts_come_in_batches_and_none_may_be_empty():
    texts = [f"text {i}" for i in range(LINES + 1)]
    assert [len(batch) for batch in input_lines(texts)] == [LINES, 1]
    with pytest.raises(InputError, match="TEXT: expected a text, got only white space"):
        next(input_lines(["a text", " "]))


def test_a_byte_order_mark_is_no_part_of_the_first_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffa text\r\n\ufeffanother\n"))
    assert list(input_lines([])) == [["a text", "\ufeffanother"]]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_standard_input_is_decoded_as_files_are(encoding: str, monkeypatch, tmp_path: Path):
    (tmp_path / "texts.txt").write_bytes("một phim\r\nhay\n".encode(encoding))
    for file, lines in (("-", False), ("-", True), (None, True)):
        with (tmp_path / "texts.txt").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            texts = [*input_lines([], file, lines)]
            assert texts == [*input_lines([], str(tmp_path / "texts.txt"), lines)]
            assert texts == [["một phim", "hay"] if lines else ["một phim\r\nhay"]]
            assert not stdin.closed


def test_standard_input_that_is_no_text_is_refused(monkeypatch, tmp_path: Path):
    (tmp_path / "texts.txt").write_bytes(b"phim hay\ncaf\xe9 \n")
    with (tmp_path / "texts.txt").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(InputError, match=r"^standard input: not UTF-8 text \(.* 0xe9 at byte 12\); save"):
            list(input_lines([], lines=True))


def test_a_word_too_many_is_explained(train_tiny: Trained, complaint: Callable[..., str]):
    error = complaint("evaluate", train_tiny("lm"), "texts")
    assert "unexpected 'texts': expected RUN and options (see polyformer evaluate --help)" in error
