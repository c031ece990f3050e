"""Recipes for user data: a recipe for the guessed type of the data, adapted to them."""

import contextlib
from collections.abc import Mapping
from typing import Any

from polyformer.core.errors import InputError
from polyformer.data.guess import Guess, guess
from polyformer.data.prepared.text import is_prepared_source
from polyformer.models.config import ModelConfig, max_positions
from polyformer.training.recipes.find import find_recipe
from polyformer.training.recipes.guessed_images import for_checkpoint, for_labels, for_pixels
from polyformer.training.recipes.recipe import ModelChoice, merged, nested
from polyformer.training.tasks import TaskConfig

BASES = {
    "classify": "classify",
    "classify_pair": "classify",
    "choose": "classify",
    "translate": "translate",
    "summarize": "summarize",
    "extract": "bertsum",
    "tag": "tag",
    "qa": "answer",
    "image": "image",
    "super_resolution": "super-resolution",
    "classify_image": "classify-image",
    "act": "dt",
}
"""The recipe for each kind of task; other kinds use `default`."""

USUAL = 512
"""Maximum tokens of a text for most encoders; by default tasks cut texts at this length or earlier."""


def guessed_recipe(
    path: str, name: str | None, changes: Mapping[str, Any], pretrained: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe that trains on `path`, as plain data, and a line for each guess in it.

    `name` is the recipe that the user names, if any; `changes` are the options that the user sets, by
    dotted names, which are not guessed (the caller adds them to the recipe); `pretrained` is a checkpoint.
    """
    stated: dict[str, Any] = {}
    for option, value in changes.items():
        stated = merged(stated, nested(option, value))
    task = stated.get("task")
    kind = task if isinstance(task, str) else (task or {}).get("kind")
    recipe = find_recipe(name, pretrained is not None) if name else None
    if recipe is not None and kind is None:
        kind = _kind(recipe)
    data = stated.get("data")
    options = {**((recipe or {}).get("data") or {}), **(data if isinstance(data, dict) else {})}
    options = {option: value for option, value in options.items() if value is not None}
    known = recipe

    def base(kind: str) -> dict[str, Any]:
        return known or find_recipe(BASES.get(kind, "default"), pretrained is not None)

    guessed = guess(path, options, kind, lambda kind: base(kind).get("data") or {})
    if recipe is None:
        recipe = base(guessed.kind)
        if _kind(recipe) != guessed.kind and kind is None:
            recipe = merged(recipe, {"task": {**recipe["task"], "kind": guessed.kind}})
    recipe["data"] = {**(recipe.get("data") or {}), **guessed.data}
    if guessed.kind == "lm" and is_prepared_source(path):
        recipe = merged(recipe, {"task": {"ngram_order": 0}})  # n-grams are counted in memory
    if guessed.kind in ("image", "super_resolution"):
        recipe = for_pixels(recipe, options, guessed, task if isinstance(task, dict) else {})
    if guessed.kind == "classify_image" and pretrained is not None:
        recipe = for_checkpoint(recipe, guessed, pretrained)
    elif guessed.kind == "classify_image":
        recipe = for_labels(recipe, options, guessed, usual=name is None)
    return _for_model(recipe, stated, pretrained, guessed), guessed.said


def _for_model(
    recipe: dict[str, Any], stated: dict[str, Any], pretrained: str | None, guessed: Guess
) -> dict[str, Any]:
    """Return the recipe with the maximum text length of the model, if it is longer than usual.

    Only models with a position table have a maximum length. A model that is not found raises an error later.
    """
    parts = {name: recipe.get(name) or {} for name in ("model", "task")}
    asked = merged(parts, {name: stated[name] for name in parts if name in stated})
    task = asked["task"] if isinstance(asked["task"], dict) else {"kind": asked["task"]}
    kind = TaskConfig.kinds.get(guessed.kind)
    if "max_length" in task or getattr(kind, "length_option", None) != "max_length":
        return recipe
    model, reads = asked["model"], None
    if pretrained is not None:
        model = {**(model if isinstance(model, dict) else {}), "pretrained": pretrained}
    with contextlib.suppress(InputError):
        config = ModelChoice.from_dict(model).config()
        reads = max_positions(config) if isinstance(config, ModelConfig) else None
    if reads is None or reads <= USUAL:
        return recipe
    length = min(reads, task.get("batch_tokens", reads))
    guessed.explain("max_length", length, f"as the model reads texts of {reads} tokens", "--task.max_length")
    return merged(recipe, {"task": {"kind": guessed.kind, "max_length": length}})


def _kind(recipe: dict[str, Any]) -> str:
    task = recipe.get("task") or "lm"
    return task if isinstance(task, str) else task.get("kind", "lm")
