"""Options from words: types, flags, places, dotted names, and complaints of one line."""

from typing import Any

import pytest

from polyformer.cli.commands import Command, load_command, options_class
from polyformer.cli.commands.options import BARE, DOTTED, parse, split_settings
from polyformer.core.errors import InputError


def parsed(name: str, words: list[str]) -> Any:
    """The options of a command."""
    return parse(name, load_command(name), words)


def test_every_sort_of_option():
    words = [
        "mine.yaml",
        "--steps",
        "-1",
        "--plot",
        "--optimizer.lr",
        "1e-3",
        "--data=a b.txt",
        "--task.labels",
        "[x, y]",
    ]
    options = parsed("train", words)
    assert (options.recipe, options.steps, options.plot, options.print) == ("mine.yaml", -1, True, False)
    assert options.data == "a b.txt"
    assert options.changes == {"optimizer.lr": 1e-3, "task.labels": ["x", "y"]}
    assert parsed("train", []) == options_class(load_command("train"))()


def test_texts_stay_texts():
    assert parsed("translate", ["run", "yes"]).text == ("yes",)
    assert parsed("translate", ["run", "12", "a b"]).text == ("12", "a b")
    assert parsed("generate", ["run", "--prompt", "{a: 1}"]).prompt == ("{a: 1}",)
    assert parsed("generate", ["run", "--prompt", "null", "--seed", "1"]).prompt == ("null",)
    assert parsed("translate", ["run"]).text == ()
    assert parsed("generate", ["run"]).prompt == ()


@pytest.mark.parametrize(
    "words",
    [
        ["run", "a b", "c", "--source-language", "en", "--num-beams=2"],
        ["run", "--source-language", "en", "a b", "c", "--num-beams", "2"],
        ["--num-beams", "2", "run", "a b", "--source-language", "en", "c"],
        ["--num-beams", "2", "--source-language", "en", "--", "run", "a b", "c"],
    ],
)
def test_options_come_before_between_and_after_texts(words: list[str]):
    options = parsed("translate", words)
    assert (options.run, options.text) == ("run", ("a b", "c"))
    assert (options.source_language, options.num_beams) == ("en", 2)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "a b", "c", "--seed", "3", "--compile"],
        ["run", "--seed", "3", "a b", "--compile", "c"],
        ["--compile", "--seed", "3", "run", "a b", "c"],
    ],
)
def test_prompts_are_arguments_among_options(words: list[str]):
    options = parsed("generate", words)
    assert (options.run, options.text, options.prompt) == ("run", ("a b", "c"), ())
    assert (options.seed, options.compile) == (3, True)


def test_an_option_of_several_values_ends_at_the_next_option():
    options = parsed("generate", ["--prompt", "a", "b", "--compile", "run"])
    assert (options.run, options.prompt, options.compile) == ("run", ("a", "b"), True)
    with pytest.raises(
        InputError, match="RUN is missing; put it before --prompt, which takes all the values"
    ):
        parsed("generate", ["--prompt", "a", "run"])


def test_texts_may_look_like_options():
    assert parsed("tag", ["run", "-5", "- a list", "--device", "cpu"]).text == ("-5", "- a list")
    assert parsed("tag", ["run", "--device", "cpu", "--", "--x", "-y"]).text == ("--x", "-y")


def test_values_are_read_as_yaml():
    rest, settings = split_settings(
        ["--a.b=1", "x", "--c.d", "true", "--e.f-g", "[1, 2]", "--h", "-2"], DOTTED
    )
    assert rest == ["x", "--h", "-2"]
    assert settings == {"a.b": 1, "c.d": True, "e.f-g": [1, 2]}
    assert split_settings(["attention", "--length", "64", "--help"], BARE) == (
        ["attention", "--help"],
        {"length": 64},
    )


def test_a_setting_of_a_bench_takes_all_values_after_it():
    words = [
        "attention",
        "--members",
        "Window(4) | Global(1)",
        "--lengths",
        "16",
        "32",
        "--backward",
        "--d=-1",
    ]
    settings = {"members": "Window(4) | Global(1)", "lengths": [16, 32], "backward": True, "d": -1}
    assert split_settings(words, BARE, several=True) == (["attention"], settings)
    assert parsed("bench", words).changes == settings


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train", ["--stepz", "3"], "unknown option '--stepz': did you mean '--steps'"),
        ("train", ["--steps", "many"], "--steps: expected int, got 'many'"),
        ("train", ["--device", "tpu"], "--device: expected 'auto' or 'cpu' or 'cuda', got 'tpu'"),
        ("train", ["--steps"], "--steps: expected a value after it"),
        ("train", ["--plot=yes"], "--plot: expected no value after it, got 'yes'"),
        ("generate", ["run", "--temperature", "inf"], "--temperature: expected float, got 'inf'"),
        ("train", ["-x"], "unknown option '-x'"),
        (
            "train",
            ["a", "b"],
            "unexpected 'b': expected RECIPE and options .* put quotes around a text of several words",
        ),
        ("train", ["--a.b"], "--a.b: expected a value after it"),
        ("train", ["--a.b", "--steps"], "--a.b: expected a value after it"),
        ("train", ["--a.b", "[1"], "--a.b, line 1: not YAML .*; put quotes around a string"),
        ("translate", ["--sorce-language", "en", "run"], "unknown option '--sorce-language'"),
        ("tune", ["x"], "unexpected 'x': expected nothing and options"),
        ("generate", [], "RUN is missing; see polyformer command --help"),
        ("bench", ["speed"], "WHAT: expected 'all' or .*'attention' or .*, got 'speed'"),
    ],
)
def test_complaints(command: str, words: list[str], message: str):
    with pytest.raises(InputError, match=message) as caught:
        parse("command", load_command(command), words)
    assert "\n" not in str(caught.value)


def test_a_command_may_have_no_options():
    import dataclasses

    @dataclasses.dataclass
    class EmptyOptions:
        """No options."""

    def run(options: EmptyOptions) -> None: ...

    assert parse("empty", Command(run, "Nothing.", ""), []) == EmptyOptions()
