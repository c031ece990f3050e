"""Sizes chosen from the amount of data: never a preset for tests, nothing that the user states."""

import csv
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyformer.attention.patterns import Window
from polyformer.models.presets import MODELS
from polyformer.training.recipes import Recipe
from polyformer.training.recipes.guessed import BASES, guessed_recipe
from polyformer.training.recipes.recipe import merged, nested
from polyformer.training.recipes.sizes import (
    LONG_TEXTS,
    PHOTOGRAPHS,
    SAME,
    TABLES,
    Amount,
    chosen_size,
    chosen_steps,
    measured_amount,
)

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs", "that", "ran", "over", "hills"]


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def write(path: Path, header: list[str], rows: list[list[str]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    draw = random.Random(0)
    return write(
        tmp_path / "pairs.csv", ["source", "target"], [[sentence(draw, 8)] * 2 for _ in range(2_000)]
    )


def chosen(path: str, changes: dict[str, Any], name: str | None = None) -> tuple[Recipe, list[str]]:
    data, lines = guessed_recipe(path, name, changes)
    for option, value in changes.items():
        data = merged(data, nested(option, value))
    return Recipe.from_dict(data), lines


def test_pairs_get_a_translator_of_their_size(pairs: str):
    recipe, lines = chosen(pairs, {})
    model: Any = recipe.model_config()
    assert recipe.model.preset == "transformer-small"
    assert (model.hidden_size, model.encoder.num_hidden_layers, model.decoder.num_hidden_layers) == (
        128,
        2,
        2,
    )
    assert recipe.tokenizer.vocab_size == 1_500
    assert recipe.training.saving.final == "best"
    assert recipe.schedule.warmup * 10 <= recipe.training.steps
    for option in ("model.hidden_size", "tokenizer.vocab_size", "training.steps", "optimizer.lr"):
        assert any(line.startswith("guessed ") and line.endswith(f"(--{option})") for line in lines), option
    assert any("2,000 rows of " in line for line in lines)


def test_stated_sizes_are_kept_and_not_explained(pairs: str):
    changes = {
        "tokenizer.vocab_size": 300,
        "model.hidden_size": 64,
        "training.steps": 20,
        "optimizer.lr": 1e-4,
        "model.dropout": 0.4,
        "task.batch_tokens": 512,
    }
    recipe, lines = chosen(pairs, changes)
    model: Any = recipe.model_config()
    assert (recipe.tokenizer.vocab_size, recipe.training.steps, recipe.optimizer.lr) == (300, 20, 1e-4)
    assert (model.hidden_size, model.encoder.dropout, recipe.task.batch_tokens) == (64, 0.4, 512)
    assert model.encoder.feedforward.intermediate_size == 256
    assert recipe.schedule.warmup == 2
    assert not [line for line in lines if any(f"--{option})" in line for option in changes)]


@pytest.mark.parametrize("option", ["model", "model.preset"])
def test_a_model_that_the_user_names_keeps_the_recipe(pairs: str, option: str):
    recipe, lines = chosen(pairs, {option: "transformer-base"})
    assert recipe.model.preset == "transformer-base"
    assert recipe.optimizer.kind == "adam"
    assert not any(line.startswith("guessed model") for line in lines)


def test_an_attention_that_the_user_names_needs_no_dropout(pairs: str):
    recipe, _ = chosen(pairs, {"model.encoder.attention": "linformer"})
    model: Any = recipe.model_config()
    assert model.hidden_size == 128
    assert model.encoder.attention.mechanism.kind == "linformer"


@pytest.mark.parametrize("name", [None, "classify"])
def test_reviews_get_a_small_classifier_that_forgets(tmp_path: Path, name: str | None):
    draw = random.Random(0)
    rows = [[sentence(draw, 300), "good" if i % 2 else "bad"] for i in range(300)]
    recipe, _ = chosen(write(tmp_path / "reviews.csv", ["text", "label"], rows), {}, name)
    model: Any = recipe.model_config()
    task: Any = recipe.task
    assert (recipe.model.preset, model.encoder.num_hidden_layers, model.hidden_size) == (
        "encoder-small",
        1,
        64,
    )
    assert model.head.pooling == "mean"
    assert task.token_dropout == 0.3
    assert recipe.tokenizer.lowercase
    assert (task.max_length, task.batch_tokens) == (1024, 16_384)
    assert model.encoder.position.kind == "none"


def test_taggers_see_the_neighbours_of_a_word(tmp_path: Path):
    lines = [f"{word}\tX" for word in WORDS]
    (tmp_path / "tags.conll").write_text("\n\n".join(["\n".join(lines)] * 20))
    config: Any = chosen(str(tmp_path / "tags.conll"), {})[0].model_config()
    assert config.encoder.attention.mechanism.pattern == Window(2)
    assert config.encoder.attention.mechanism.dropout == 0
    config = chosen(str(tmp_path / "tags.conll"), {"model.attention": "Window(5)"})[0].model_config()
    assert config.encoder.attention.mechanism.pattern == Window(5)


def test_short_texts_need_no_long_rows(tmp_path: Path):
    draw = random.Random(0)
    rows = [[sentence(draw, 5), "good" if i % 2 else "bad"] for i in range(30)]
    recipe, _ = chosen(write(tmp_path / "short.csv", ["text", "label"], rows), {})
    task: Any = recipe.task
    assert (task.max_length, task.batch_tokens) == (512, 4096)


def test_no_table_names_a_model_for_tests():
    for table in (*TABLES.values(), *LONG_TEXTS.values(), *PHOTOGRAPHS.values()):
        assert "tests" not in (MODELS[table.model].__doc__ or "")
    assert set(SAME.values()) <= TABLES.keys()
    assert {*TABLES, *SAME} <= {*BASES, "lm"}


def test_larger_data_get_no_smaller_model_and_no_more_passes():
    for kind, table in (*TABLES.items(), *LONG_TEXTS.items(), *PHOTOGRAPHS.items()):
        assert table.sizes[0].least == 0, kind
        for small, large in zip(table.sizes, table.sizes[1:]):
            assert small.least < large.least
            assert small.layers * small.hidden**2 <= large.layers * large.hidden**2
            assert small.passes >= large.passes
            assert small.vocab <= large.vocab


def test_steps_follow_the_passes_within_the_limits_of_the_table():
    table = TABLES["translate"]
    amount = Amount(rows=1_000, tokens=60_000)
    size = chosen_size(table, amount)
    assert chosen_steps(size, amount, 2_048, 2) == size.passes * 60_000 // 4_096 // 10 * 10
    assert chosen_steps(size, Amount(1, 1), 2_048, 2) == 100
    assert chosen_steps(size, Amount(10**9, 10**9), 2_048, 2) == size.steps


def test_amounts_are_counted_once_and_images_by_their_files(tmp_path: Path, pairs: str, monkeypatch: Any):
    amount = measured_amount({"path": pairs}, "translate")
    text = Path(pairs).read_text().replace(",", "\n").splitlines()[2:]
    assert (amount.rows, amount.more) == (2_000, False)
    assert amount.tokens == sum(map(len, text)) // 4
    monkeypatch.setattr("polyformer.training.recipes.sizes.SAMPLED_ROWS", 50)
    assert measured_amount({"path": pairs}, "translate").more
    assert str(measured_amount({"path": pairs}, "translate")).startswith("at least 50 rows of ")
    for i in range(3):
        (tmp_path / "pets" / str(i)).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "pets" / str(i) / "a.png")
    assert measured_amount({"path": str(tmp_path / "pets")}, "classify_image") == Amount(3)


def test_without_validation_data_the_last_weights_are_kept(pairs: str):
    recipe, _ = chosen(pairs, {"data.validation_fraction": 0.0})
    assert recipe.training.saving.final == "last"


def pictures(folder: Path, mode: str, size: tuple[int, int]) -> str:
    """A folder with a few pictures of two labels."""
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for i in range(4):
            Image.new(mode, size).save(folder / label / f"{i}.png")
    return str(folder)


@pytest.mark.parametrize(
    ("mode", "side", "patch"),
    [
        ("L", 16, 2),
        ("L", 28, 4),
        ("L", 64, 8),
        ("RGB", 8, 2),
        ("RGB", 32, 8),
        ("RGB", 48, 8),
        ("RGB", 90, 16),
    ],
)
def test_patches_follow_the_size_of_the_images(tmp_path: Path, mode: str, side: int, patch: int):
    recipe, lines = chosen(pictures(tmp_path, mode, (side, side)), {})
    config: Any = recipe.model_config()
    assert config.patch_size == (patch, patch)
    assert any(line.startswith(f"guessed patches: {patch} x {patch} pixels") for line in lines)
    stated, lines = chosen(str(tmp_path), {"model.patch_size": [7, 7]})
    config = stated.model_config()
    assert config.patch_size == (7, 7)
    assert not any("patches" in line for line in lines)


def test_colour_images_are_read_by_convolutions(tmp_path: Path):
    path = pictures(tmp_path, "RGB", (40, 32))
    recipe, lines = chosen(path, {})
    config: Any = recipe.model_config()
    assert config.convolutional_stem
    assert config.patch_size == (8, 8)
    assert dict(recipe.data.to_dict())["image_size"] == [32, 40]
    assert recipe.optimizer.lr == PHOTOGRAPHS["classify_image"].rate
    assert any(line.startswith("guessed patches are read by: convolutions") for line in lines)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.convolutional_stem": False},
        {"model.patch_size": [7, 7]},
        {"model.patch_size": 5},
        {"data.image_mode": "grey"},
        {"model.preset": "vit-mini"},
    ],
)
def test_no_convolutions_where_the_user_excludes_them(tmp_path: Path, changes: dict[str, Any]):
    path = pictures(tmp_path, "RGB", (35, 35))
    recipe, lines = chosen(path, changes)
    config: Any = recipe.model_config()
    assert not config.convolutional_stem
    assert not any("convolutions" in line for line in lines)


@pytest.mark.parametrize("words", [1, 100, 30_000])
def test_no_explanation_counts_nothing(tmp_path: Path, words: int):
    """A text that is longer than a batch is read in parts, not in "0 rows"."""
    (tmp_path / "text.txt").write_text(sentence(random.Random(0), words))
    _, lines = chosen(str(tmp_path / "text.txt"), {})
    assert any("row a step" in line or "rows a step" in line for line in lines)
    assert not [line for line in lines if " 0 " in line]
