"""Recipes: choices of models, changes by dotted names, and every recipe of the package."""

from polyformer.models.presets import model_config
from polyformer.training.recipes import ModelChoice, Recipe, find_recipe, recipe_names
from polyformer.training.recipes.recipe import flattened, merged, nested


def test_a_preset_and_its_changes():
    choice = ModelChoice.from_dict({"preset": "decoder-tiny", "hidden_size": 64, "decoder": {"dropout": 0.3}})
    config = choice.config()
    assert config.hidden_size == 64
    assert config.decoder is not None
    assert config.decoder.dropout == 0.3
    assert ModelChoice.from_dict(choice.to_dict()) == choice


def test_the_bare_name_of_a_preset():
    assert ModelChoice.from_dict("decoder-tiny").config() == model_config("decoder-tiny")


def test_a_whole_configuration():
    whole = model_config("transformer-tiny")
    choice = ModelChoice.from_dict(whole.to_dict())
    assert choice.config() == whole
    assert choice.to_dict() == whole.to_dict()


def test_a_part_with_a_kind_is_taken_whole():
    choice = ModelChoice.from_dict({"preset": "decoder-tiny", "position": {"kind": "sinusoidal"}})
    assert choice.config() == model_config("decoder-tiny", {"position": "sinusoidal"})


def test_merging_goes_into_mappings_and_a_new_kind_starts_anew():
    base = {"schedule": {"kind": "cosine", "floor": 0.1, "warmup": 3}, "seed": 1}
    assert merged(base, {"schedule": {"warmup": 9}})["schedule"] == {
        "kind": "cosine",
        "floor": 0.1,
        "warmup": 9,
    }
    assert merged(base, {"schedule": {"kind": "noam", "hidden_size": 8}})["schedule"] == {
        "kind": "noam",
        "hidden_size": 8,
    }
    assert merged(base, {"seed": 2}) == {**base, "seed": 2}
    assert base["schedule"]["warmup"] == 3


def test_dotted_names():
    assert nested("a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert flattened({"a": {"b": 1, "c": {"kind": "x"}}, "d": 2}) == {"a.b": 1, "a.c": {"kind": "x"}, "d": 2}


def test_the_recipes_of_the_package():
    assert {"default", "wikitext2", "multi30k", "sst2", "wnut17"} <= set(recipe_names())


def test_every_recipe_is_whole():
    for name in recipe_names():
        recipe = Recipe.from_dict(find_recipe(name))
        assert recipe.model.config().hidden_size > 0, name
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe, name


def test_a_model_that_begins_with_a_checkpoint_reads_by_its_tokenizer():
    model = {"pretrained": "some/checkpoint"}
    assert Recipe.from_dict({"model": model}).tokenizer.path == "some/checkpoint"
    other = Recipe.from_dict({"model": model, "tokenizer": {"algorithm": "bytes"}})
    assert other.tokenizer.path is None
    assert Recipe.from_dict({"model": "decoder-tiny"}).tokenizer.path is None
