"""Recipes for user data: a recipe for the guessed type of the data, adapted to them.

Another source for a finished run is read like the data of the run: the same columns, in its own format.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyformer.attention.patterns import Local2D
from polyformer.attention.patterns.base import contains
from polyformer.core.errors import InputError
from polyformer.data import DataConfig, read
from polyformer.data.formats.guess import Guess, guess, guess_reading
from polyformer.data.formats.images import SUFFIXES
from polyformer.data.prepared.rows import is_prepared_source
from polyformer.data.sources.origins import source_files
from polyformer.models.architectures import VisionConfig
from polyformer.models.checkpoints import config_of
from polyformer.models.config import ModelConfig, max_positions
from polyformer.training.recipes.recipe import ModelChoice, find_recipe, merged, with_changes, with_data
from polyformer.training.recipes.sizes import with_sizes
from polyformer.training.tasks import TaskConfig

BASES = {
    "classify": "classify",
    "classify_pair": "classify",
    "classify_grouped": "classify",
    "regress_pair": "classify",
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
    "sft": "sft",
    "dpo": "dpo",
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
    stated = with_changes({}, changes)
    task = stated.get("task")
    kind = task if isinstance(task, str) else (task or {}).get("kind")
    recipe = find_recipe(name, pretrained is not None) if name else None
    if recipe is not None and kind is None:
        kind = _kind(recipe)
    data = stated.get("data")
    options = {**((recipe or {}).get("data") or {}), **(data if isinstance(data, dict) else {})}
    # None as the column of parts turns it off; other options without a value are guessed.
    options = {option: value for option, value in options.items() if value is not None or option == "split"}
    known = recipe

    def base(kind: str) -> dict[str, Any]:
        return known or find_recipe(BASES.get(kind, "default"), pretrained is not None)

    chats = pretrained is not None or "task.template" in changes
    guessed = guess(path, options, kind, lambda kind: base(kind).get("data") or {}, chats)
    if recipe is None:
        recipe = base(guessed.kind)
        if _kind(recipe) != guessed.kind and kind is None:
            recipe = merged(recipe, {"task": {**recipe["task"], "kind": guessed.kind}})
    recipe["data"] = {**(recipe.get("data") or {}), **guessed.data}
    if guessed.task:
        recipe = merged(recipe, {"task": guessed.task})
    if guessed.kind == "lm" and is_prepared_source(path):
        recipe = merged(recipe, {"task": {"ngram_order": 0}})  # n-grams are counted in memory
    if guessed.kind in ("image", "super_resolution"):
        recipe = for_pixels(recipe, options, guessed, task if isinstance(task, dict) else {})
    if guessed.kind == "classify_image" and pretrained is not None:
        recipe = for_checkpoint(recipe, guessed, pretrained)
    named = pretrained is not None or not {"model", "model.preset"}.isdisjoint(changes)
    sized = not named and name in (None, *BASES.values(), "default")
    if guessed.kind == "classify_image" and pretrained is None:
        stem = sized and changes.get("model.convolutional_stem", True) is not False
        recipe = for_labels(recipe, options, guessed, name is None, stem, changes.get("model.patch_size"))
    if sized:
        recipe = with_sizes(recipe, {**recipe["data"], **options}, changes, guessed)
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


SIDE = 32
"""Side of the square to which large images, or images of several sizes, are scaled, for a model of pixels."""

LARGEST = 64
"""Maximum side for classification; larger images, or images of several sizes, are scaled to this square."""

PATCHES = 8
"""The most patches in a row of an image: more cost time, fewer hide what small photographs show."""

STEM_PATCHES = 4
"""The fewest patches by convolutions in a row: channels keep small details, so that few patches suffice."""

SHIFTS = 8
"""Photographs are shifted by at most the side over this (He et al. 2016, section 4.2: 4 of 32 pixels)."""

SAMPLE = 20
"""Number of images that are inspected."""


def for_pixels(
    recipe: dict[str, Any], options: dict[str, Any], guessed: Guess, task: dict[str, Any]
) -> dict[str, Any]:
    """Return the recipe of a model of pixels for the shape of the images: positions, pattern, batch size.

    `task`: the options of the task that the user sets.
    """
    sizes, modes = _sampled(recipe, options)
    height, width = min(sizes)
    channels = modes[0]
    if "image_size" not in options and (len(sizes) > 1 or height * width > 4 * SIDE**2):
        why = "they have several sizes" if len(sizes) > 1 else f"of {height} x {width} pixels"
        guessed.explain(
            "size", f"the middle of each image, {SIDE} x {SIDE}", why, "--data.image_size '[H, W]'"
        )
        recipe["data"]["image_size"] = [SIDE, SIDE]
        height = width = SIDE
    if len({*modes}) > 1 and "image_mode" not in options:
        guessed.explain("colours", "rgb", "some images are grey and some are not", "--data.image_mode")
        recipe["data"]["image_mode"], channels = "rgb", 3
    shape = [height, width, *([channels] if channels > 1 else [])]
    near = [max(1, height // 4), max(1, width // 4)]
    pattern = f"Local2D(shape={shape}, query={near}, memory={[*near, near[1]]})"
    model: dict[str, Any] = {"position": {"kind": "grid", "shape": shape}}
    if contains(ModelChoice.from_dict(recipe["model"]).config(), Local2D):
        model["pattern"] = pattern
    if guessed.kind == "super_resolution":
        factor = {**recipe["task"], **task}["factor"]
        small = {"kind": "grid", "shape": [height // factor, width // factor, *shape[2:]]}
        model = {
            "encoder": {"position": small},
            "decoder": {"position": model["position"], "attention": pattern},
        }
    row_length = math.prod(shape) + 1
    guessed.explain("shape", " x ".join(map(str, shape)), "as the first images are", "--model.position.shape")
    return merged(
        recipe,
        {
            "task": {"levels": 16, "batch_tokens": max(2048 // row_length, 4) * row_length},
            "model": model,
        },
    )


def for_labels(
    recipe: dict[str, Any],
    options: dict[str, Any],
    guessed: Guess,
    usual: bool,
    stem: bool = False,
    patch_size: Any = None,
) -> dict[str, Any]:
    """Return the recipe that classifies images with their size, colours and patches.

    Colour images are assumed to be photographs. usual: the user did not name the recipe, so that its
    augmentation may be changed: photographs may be mirrored. stem: photographs may be read by convolutions.
    patch_size: the patches that the user states.
    """
    sizes, modes = _sampled(recipe, options)
    mode = options.get("image_mode") or ("rgb" if max(modes) > 1 else "grey")
    stem = stem and mode == "rgb" and (patch_size is None or fits_stem(patch_size))
    several, (height, width) = len(sizes) > 1, min(sizes)
    scaled = "image_size" not in options and (several or max(height, width) > LARGEST)
    patch = patches_of((LARGEST, LARGEST) if scaled else (height, width), stem)
    if "image_size" not in options:
        size, why = [height // patch[0] * patch[0], width // patch[1] * patch[1]], "as they are"
        if scaled:
            why = "they have several sizes" if several else f"of {height} x {width} pixels"
            size = [LARGEST, LARGEST]
        said = f"the middle of each image, {size[0]} x {size[1]}"
        guessed.explain("size", said, why, "--data.image_size '[H, W]'")
        recipe["data"]["image_size"] = size
    if "image_mode" not in options:
        recipe["data"]["image_mode"] = mode
        why = "some images have colours" if len({*modes}) > 1 else "as the images are"
        guessed.explain("colours", mode, why, "--data.image_mode")
    if "patch_size" not in recipe["model"] and patch_size is None:
        guessed.explain(
            "patches", f"{patch[0]} x {patch[1]} pixels", "by the size", "--model.patch_size '[H, W]'"
        )
        recipe = merged(recipe, {"model": {"patch_size": patch}})
    if stem:
        way = "--model.convolutional_stem"
        guessed.explain("patches are read by", "convolutions", "they have colours", way)
        recipe = merged(recipe, {"model": {"convolutional_stem": True}})
    return with_mirrors(recipe, options, guessed) if usual and mode == "rgb" else recipe


def with_mirrors(recipe: dict[str, Any], options: dict[str, Any], guessed: Guess) -> dict[str, Any]:
    """Return the recipe with mirrored and shifted training images, without rotations."""
    guessed.explain(
        "mirror images", "half of the training images", "they have colours", "--task.augmentation.flip"
    )
    height = (options.get("image_size") or recipe["data"]["image_size"])[0]
    view = {"flip": 0.5, "rotation": 0.0, "shift": max(1, height // SHIFTS)}
    return merged(recipe, {"task": {"augmentation": view}})


def for_checkpoint(recipe: dict[str, Any], guessed: Guess, folder: str) -> dict[str, Any]:
    """Return the recipe that classifies images with the size, colours and normalization of the checkpoint.

    Raises `InputError` for a checkpoint that reads no images.
    """
    config: Any = config_of(folder)
    if not isinstance(config, VisionConfig):
        raise InputError(f"--pretrained: {folder} reads no images; name a checkpoint of a Vision Transformer")
    height, width = config.image_size
    guessed.explain(
        "size", f"the middle of each image, {height} x {width}", f"as {folder} reads", "--data.image_size"
    )
    mode = "rgb" if config.num_channels == 3 else "grey"
    numbers = {"mean": config.mean, "std": config.std}
    task = {name: [*values] * (config.num_channels // len(values)) for name, values in numbers.items()}
    return merged(recipe, {"data": {"image_size": [height, width], "image_mode": mode}, "task": task})


def patches_of(size: tuple[int, int], stem: bool) -> list[int]:
    """Return the sides of the patches of images of `size`; for a convolutional stem both are the same."""
    if stem:
        return [stem_side(min(size))] * 2
    return [patch_side(size[0]), patch_side(size[1])]


def patch_side(side: int) -> int:
    """Return the side of patches for images of this side: 2 or more, at most `PATCHES` in a row."""
    return min(side, max(2, math.ceil(side / PATCHES)))


def stem_side(side: int) -> int:
    """Return the side of patches by convolutions: a power of 2 from 2, at least `STEM_PATCHES` in a row."""
    return max(2, 1 << (side // STEM_PATCHES).bit_length() - 1) if side >= STEM_PATCHES else 2


def fits_stem(patch: Any) -> bool:
    """Return whether a convolutional stem makes patches of this size: squares with a power of 2 as side."""
    high, wide = patch if isinstance(patch, list | tuple) and len(patch) == 2 else (patch, patch)
    return isinstance(high, int) and high == wide and high > 1 and high.bit_count() == 1


def _sampled(recipe: dict[str, Any], options: dict[str, Any]) -> tuple[set[tuple[int, int]], list[int]]:
    """Return the sizes (height, width) of some of the images, and the channels of each.

    The sample is the first images, or evenly spread over the files of a folder, which are sorted by label.
    """
    config = DataConfig.from_dict(
        {**recipe["data"], **options, "streaming": True, "test_fraction": 0.0}, "data"
    )
    files = [] if config.path is None else source_files(config.path)
    pictures = [str(file) for file in files if Path(file).suffix.lower() in SUFFIXES]
    step = max(1, len(pictures) // SAMPLE)
    rows = itertools.chain.from_iterable(
        read(config, ("image", "height", "width"), path)  # type: ignore[call-overload]
        for path in pictures[::step] or [config.path]
    )
    chosen: list[Any] = list(itertools.islice(rows, SAMPLE))
    sizes = {(row["height"], row["width"]) for row in chosen}
    return sizes, [len(row["image"]) // (row["height"] * row["width"]) for row in chosen]


def for_another_source(
    config: DataConfig, path: str, changes: dict[str, Any], kind: str
) -> tuple[DataConfig, list[str]]:
    """Return the data options of a run for the source `path`, and a line for each guess in them.

    config: the options of the run. changes: options that the user sets. kind: the kind of the task.
    The names of columns stay those of the run, unless the source has a heading of its own.
    """
    before = config.to_dict()
    data = {name: value for name, value in with_data(before, path).items() if value is not None}
    if data["path"] == path:
        data = {name: value for name, value in data.items() if name not in ("split", "validation", "test")}
    data = merged(data, changes)
    if data["path"] != path:  # a folder with the files that the run's options name
        return DataConfig.from_dict(data, "data"), []
    header = None if "header" in changes else before.get("header")
    if header is not None:
        data.pop("header", None)
    guessed = guess_reading(path, data, kind, header)
    columns = {**guessed.data.pop("columns", {}), **(data.get("columns") or {})}
    data = {**data, **guessed.data, "columns": columns}
    return DataConfig.from_dict(data, "data"), guessed.said
