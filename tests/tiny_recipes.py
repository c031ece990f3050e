"""Recipes that train in a moment, for tests of runs."""

from pathlib import Path
from typing import Any

from polyformer.training.recipes import Recipe
from polyformer.training.recipes.recipe import merged

TEXT = "".join(f"the line of number {index} says little\n" for index in range(30))


def tiny_recipe(path: Path, steps: int = 4, **changes: Any) -> Recipe:
    """A language model of bytes on the lines of the file `path`, `changes` merged into its mapping."""
    recipe = {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64, "ngram_order": 2},
        "model": {"preset": "decoder-tiny", "hidden_size": 16, "num_hidden_layers": 1},
        "data": {"path": str(path), "format": "lines", "validation_fraction": 0.25},
        "tokenizer": {"algorithm": "bytes"},
        "training": {"steps": steps, "engine": {"device": "cpu"}, "saving": {"checkpoint_every": 2}},
    }
    return Recipe.from_dict(merged(recipe, changes))
