"""The recipe for data of one's own: the one that fits what they are guessed to be, made to fit them."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from polyformer.data import DataConfig, read
from polyformer.data.guess import Guess, guess
from polyformer.data.prepared.text import is_prepared_source
from polyformer.recipes.find import find_recipe
from polyformer.recipes.recipe import merged, nested

BASES = {
    "classify": "classify",
    "classify_pair": "classify",
    "choose": "classify",
    "translate": "translate",
    "summarize": "summarize",
    "tag": "tag",
    "qa": "answer",
    "image": "image",
    "act": "dt",
}
"""The recipe for each kind of task; `default` for the others."""

SIDE = 32
"""Images larger than two such squares, or of several sizes, are scaled to one."""


def guessed_recipe(
    path: str, name: str | None, changes: Mapping[str, Any], pretrained: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """A recipe that trains on `path`, as plain data, and what was guessed for it, in lines.

    `name`: the recipe that is asked for; `changes`: options that the user states, by dotted names, which are
    not guessed at (and are put into the recipe by the caller).
    """
    stated: dict[str, Any] = {}
    for option, value in changes.items():
        stated = merged(stated, nested(option, value))
    task = stated.get("task")
    kind = task if isinstance(task, str) else (task or {}).get("kind")
    recipe = find_recipe(name, pretrained) if name else None
    if recipe is not None and kind is None:
        kind = _kind(recipe)
    data = stated.get("data")
    options = data if isinstance(data, dict) else {}
    guessed = guess(path, options, kind)
    if recipe is None:
        recipe = find_recipe(BASES.get(guessed.kind, "default"), pretrained)
        if _kind(recipe) != guessed.kind and kind is None:
            recipe = merged(recipe, {"task": {**recipe["task"], "kind": guessed.kind}})
    recipe["data"] = {**(recipe.get("data") or {}), **guessed.data}
    if guessed.kind == "lm" and is_prepared_source(path):
        recipe = merged(recipe, {"task": {"ngram_order": 0}})  # it counts in memory
    if guessed.kind == "image":
        recipe = _for_images(recipe, options, guessed)
    return recipe, guessed.said


def _kind(recipe: dict[str, Any]) -> str:
    task = recipe.get("task") or "lm"
    return task if isinstance(task, str) else task.get("kind", "lm")


def _for_images(recipe: dict[str, Any], options: dict[str, Any], guessed: Guess) -> dict[str, Any]:
    """With the images' shape where the recipe has another's: positions, pattern, and room in a batch."""
    known = {name: value for name, value in options.items() if value is not None}
    config = DataConfig.from_dict(
        {**recipe["data"], **known, "streaming": True, "test_fraction": 0.0}, "data"
    )
    rows = list(itertools.islice(read(config, ("image", "height", "width"), config.path), 20))  # type: ignore[call-overload]
    sizes = {(row["height"], row["width"]) for row in rows}
    height, width = min(sizes)
    channels = len(rows[0]["image"]) // (rows[0]["height"] * rows[0]["width"])
    if "image_size" not in options and (len(sizes) > 1 or height * width > 4 * SIDE**2):
        why = "they have several sizes" if len(sizes) > 1 else f"of {height} x {width} pixels"
        guessed.say("size", f"the middle of each image, {SIDE} x {SIDE}", why, "--data.image_size '[H, W]'")
        recipe["data"]["image_size"] = [SIDE, SIDE]
        height = width = SIDE
    modes = {len(row["image"]) // (row["height"] * row["width"]) for row in rows}
    if len(modes) > 1 and "image_mode" not in options:
        guessed.say("colours", "rgb", "some images are grey and some are not", "--data.image_mode")
        recipe["data"]["image_mode"], channels = "rgb", 3
    shape = [height, width, *([channels] if channels > 1 else [])]
    near = [max(1, height // 4), max(1, width // 4)]
    pattern = f"Local2D(shape={shape}, query={near}, memory={[*near, near[1]]})"
    room = math.prod(shape) + 1
    guessed.say("shape", " x ".join(map(str, shape)), "as the first images are", "--model.position.shape")
    return merged(
        recipe,
        {
            "task": {"levels": 16, "batch_tokens": max(2048 // room, 4) * room},
            "model": {"position": {"kind": "grid", "shape": shape}, "pattern": pattern},
        },
    )
