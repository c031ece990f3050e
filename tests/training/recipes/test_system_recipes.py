"""The recipes of the systems: each trains the small size of its system, here for two steps."""

import math
from pathlib import Path
from typing import Any

import pytest

from polyformer.core.parsing import parse_yaml
from polyformer.models.presets import list_models
from polyformer.training.recipes import Recipe, find_recipe, fit, recipe_names
from polyformer.training.recipes.recipe import merged, recipe_text

SYSTEMS = [name for name in recipe_names() if "extends" in parse_yaml(recipe_text(name), name)]
SYSTEMS.remove("super-resolution-mnist")  # trains the model of super-resolution on other images
WORDS = "".join(f"the line of number {index} says little about {index % 7}\n" for index in range(60))
TINY = {
    "data": {"path": "text.txt", "format": "lines", "validation_fraction": 0.1},
    "tokenizer": {"vocab_size": 320},
    "training": {
        "steps": 2,
        "engine": {"device": "cpu"},
        "reporting": {"evaluate_every": 2},
        "saving": {"checkpoint_every": 2, "final": "last"},
    },
}


def test_every_small_system_has_a_recipe():
    trained = {Recipe.from_dict(find_recipe(name)).model.preset for name in recipe_names()}
    own = {"decoder-small", "encoder-small", "longformer-decoder-small", "t-dmca-small", "reformer-small"}
    public = {"t5-small", "t5-v1_1-small", "electra-small", "deberta-v3-small", "transformer-small"}
    assert {*list_models("*-small")} - own - public <= trained


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(WORDS)
    for language in ("de", "en"):
        Path(f"text.{language}").write_text("\n".join(WORDS.splitlines()[:20]))
    pairs = [f"{line}. {line[4:]} again.,{line}" for line in WORDS.splitlines()[:12]]
    Path("pairs.csv").write_text("\n".join(["source,target", *pairs]) + "\n")
    rows = [f"{line},{number % 2}" for number, line in enumerate(WORDS.splitlines())]
    Path("text.csv").write_text("\n".join(["text,label", *rows]) + "\n")


def tiny(name: str) -> Recipe:
    """Return the recipe with few tokens of a tiny text a step."""
    recipe = find_recipe(name)
    kind, length = recipe["task"]["kind"], recipe["task"].get("row_length", 0)
    changes: dict[str, dict[str, Any]] = {
        "translate": {"task": {"batch_tokens": 256, "max_length": 32, "beam": {"num_beams": 1}}}
        | {"data": {"path": "text.{de,en}", "validation": None, "test": None}},
        "classify": {"task": {"batch_tokens": 512}, "data": {"path": "text.csv", "format": "csv"}},
        "image": {"task": {"batch_tokens": 130}, "data": {"path": None, "format": None}},
        "super_resolution": {"task": {"batch_tokens": 130}, "data": {"path": None, "format": None}},
        "extract": {
            "task": {"batch_tokens": 512},
            "data": {"path": "pairs.csv", "format": "csv", "test": None},
        },
        "summarize": {
            "task": {"batch_tokens": 512, "max_length": 64},
            "data": {"path": "pairs.csv", "format": "csv", "test": None},
        },
        "lm": {"task": {"batch_tokens": max(length, 256), "ngram_order": 2}, "data": {"test": None}},
    }
    own = changes.get(kind, {"task": {"batch_tokens": max(length, 256)}})
    base = merged(recipe, {**TINY, "data": {**TINY["data"], "validation": None}})
    return Recipe.from_dict(merged(base, own))


@pytest.mark.parametrize("name", [*SYSTEMS, "memorizing"])
def test_a_system_recipe_trains_to_a_finite_loss(name: str, texts: None, tmp_path: Path):
    fitted = fit(tiny(name), tmp_path / "run")
    assert math.isfinite(fitted.scores["validation"]["loss"])


def test_a_recipe_changes_the_recipe_that_it_extends(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: performer\ntask:\n  row_length: 64\n")
    performer, default = find_recipe("performer"), find_recipe("default")
    assert performer["optimizer"] == default["optimizer"]
    assert performer["model"] == "performer-small"
    assert find_recipe(str(mine)) == merged(performer, {"task": {"row_length": 64}})
