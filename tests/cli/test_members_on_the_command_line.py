"""Members are named alike on the command line, in a recipe's YAML and in Python."""

from pathlib import Path

import pytest
import yaml

from polyformer import model_config
from polyformer.cli.main import main
from polyformer.training.recipes import Recipe

MEMBERS = [
    ("attention", "linformer"),
    ("attention", "Window(4)"),
    ("attention", "Window(4) | Global(1)"),
    ("attention", "lsh(buckets=8, window=16)"),
    ("attention", "{kind: performer, features: 16}"),
    ("position", "rope"),
    ("position", "rope(base=500)"),
    ("position", "{kind: rope, base: 500}"),
    ("feedforward", "gated"),
    ("feedforward", "dense(intermediate_size=32)"),
    ("block", "pre"),
]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("axis", "member"), MEMBERS)
def test_train_takes_members_as_options_and_in_a_recipe(
    axis: str, member: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    value = yaml.safe_load(member)
    expected = model_config("encoder-tiny", {axis: value})
    words = ["--model", "encoder-tiny", "--task.kind", "mlm", f"--model.{axis}", member]
    printed = output(capsys, "train", "--print", *words)
    assert Recipe.from_dict(yaml.safe_load(printed)).model_config() == expected
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        yaml.safe_dump({"task": {"kind": "mlm"}, "model": {"preset": "encoder-tiny", axis: value}})
    )
    printed = output(capsys, "train", str(recipe), "--print")
    assert Recipe.from_dict(yaml.safe_load(printed)).model_config() == expected


def test_a_member_is_named_in_one_stack(capsys: pytest.CaptureFixture[str]):
    words = ["--model", "transformer-base", "--model.encoder.attention", "Window(4)"]
    printed = output(capsys, "train", "--print", "--task.kind", "translate", *words)
    config = Recipe.from_dict(yaml.safe_load(printed)).model_config()
    assert config == model_config("transformer-base", {"encoder.attention": "Window(4)"})


@pytest.mark.parametrize("member", ["attention=linformer(max_length=512)", "position=rope"])
def test_show_takes_members(member: str, capsys: pytest.CaptureFixture[str]):
    plain = output(capsys, "show", "encoder-tiny")
    assert output(capsys, "show", "encoder-tiny", f"--model.{member}") != plain


def test_spectrum_takes_members(capsys: pytest.CaptureFixture[str]):
    words = ["spectrum", "encoder-tiny", "--length", "16", "--texts", "1"]
    changed = output(capsys, *words, "--model.position", "rope", "--model.attention", "Window(2)")
    assert changed != output(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show . --model.attention linformer", "--model.attention: only presets have settings, and . is"),
        ("spectrum . --model.position rope", "--model.position: only presets have settings, and . is"),
        ("show pattern Full --model.position rope", "--model.position: only for presets"),
        ("show encoder-tiny --model.positoin rope", "unknown option of ModelConfig 'positoin'"),
        ("train --model.position roep", "unknown kind of position 'roep': did you mean 'rope'"),
        ("train --model.attention Windw(4)", "'Windw': did you mean 'Window'"),
    ],
)
def test_wrong_members_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
