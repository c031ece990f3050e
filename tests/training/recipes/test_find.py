"""Recipes by name or file, and the files of their data."""

from pathlib import Path
from typing import Any

import pytest

from polyformer import InputError
from polyformer.training.recipes import find_recipe
from polyformer.training.recipes.recipe import absolute, with_data


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(InputError, match="unknown recipe 'multi30': did you mean 'multi30k'"):
        find_recipe("multi30")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", "line 1: not YAML"),
        ("just words", "expected a recipe, a mapping of task, model, data and so on, got 'just words'"),
    ],
)
def test_a_recipe_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        find_recipe(str(path))
    assert str(path) in str(caught.value)


def test_a_missing_and_a_binary_file(tmp_path: Path):
    with pytest.raises(InputError, match=r"no such file: missing\.yaml"):
        find_recipe("missing.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"cannot read .*b\.yaml"):
        find_recipe(str(tmp_path / "b.yaml"))


def test_a_directory_holds_the_recipes_files_gzipped_or_not(tmp_path: Path):
    data = {"path": "train.{en,de}.gz", "validation": "val.txt", "format": "lines"}
    for name in ("train.en", "train.de", "val.txt.gz"):
        (tmp_path / name).touch()
    options = with_data(data, str(tmp_path))
    assert options == {
        "path": f"{tmp_path}/train.{{en,de}}",
        "validation": f"{tmp_path}/val.txt.gz",
        "format": "lines",
    }
    elsewhere = {**data, "validation": "/first/place/val.txt.gz"}  # of a run that was trained on other files
    assert with_data(elsewhere, str(tmp_path)) == options
    (tmp_path / "train.de").unlink()
    assert with_data(data, str(tmp_path))["path"] == f"{tmp_path}/train.{{en,de}}.gz"  # named in the error


def test_a_file_takes_the_place_of_all_files(tmp_path: Path):
    data = {
        "path": "train.tsv",
        "test": "test.tsv",
        "format": "tsv",
        "header": ["text", "label"],
        "columns": {"a": "b"},
    }
    assert with_data(data, "mine.tsv.gz") == {
        "path": "mine.tsv.gz",
        **{key: data[key] for key in ("format", "header", "columns")},
    }
    assert with_data(data, "mine.csv") == {"path": "mine.csv", "columns": {"a": "b"}}
    (tmp_path / "state.json").touch()
    assert with_data(data, str(tmp_path))["path"] == str(tmp_path)  # a saved data set


def test_paths_no_longer_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data = {"path": "a.txt", "validation": "hub:x/y", "test": None, "format": "text"}
    assert absolute(data) == {**data, "path": str(tmp_path / "a.txt")}


def test_a_recipe_says_what_changes_with_a_checkpoint():
    scratch, tuned = find_recipe("sst2"), find_recipe("sst2", pretrained=True)
    assert scratch["task"]["token_dropout"] == 0.3
    assert tuned["task"] == {**scratch["task"], "token_dropout": 0.0}
    assert tuned["optimizer"] == {
        "kind": "adamw",
        "lr": 3e-5,
        "weight_decay": 0.01,
        "decay_embeddings": False,
    }
    assert "pretrained" not in scratch | tuned


@pytest.mark.parametrize("data", [3, [1], "a.txt"])
def test_data_that_is_no_mapping(data: Any):
    with pytest.raises(InputError, match="data: "):
        with_data(data, ".")


def test_a_recipe_extends_one_of_the_package(tmp_path: Path):
    path = tmp_path / "my.yaml"
    for text, message in (("defalt", "did you mean 'default'"), ("[a]", r"unknown recipe \['a'\]")):
        path.write_text(f"extends: {text}\n")
        with pytest.raises(InputError, match=message) as caught:
            find_recipe(str(path))
        assert str(caught.value).startswith(f"{path}: extends: ")
