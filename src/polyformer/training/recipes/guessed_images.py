"""Properties of images for recipes: their size and colours, and matching patches or pixels."""

import itertools
import math
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError
from polyformer.data import DataConfig, read
from polyformer.data.guess import Guess
from polyformer.data.image_decoding import SUFFIXES
from polyformer.data.origins import source_files
from polyformer.models.architectures import VisionConfig
from polyformer.models.checkpoints import config_of
from polyformer.training.recipes.recipe import ModelChoice, merged

SIDE = 32
"""Side of the square to which large images, or images of several sizes, are scaled, for a model of pixels."""

LARGEST = 64
"""Maximum side for classification; larger images, or images of several sizes, are scaled to this square."""

PATCH = 8
"""The maximum side of a patch; a fourth of the side of images below 32 pixels."""

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
    if "Local2D(" in str(ModelChoice.from_dict(recipe["model"]).config().to_dict()):
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
    recipe: dict[str, Any], options: dict[str, Any], guessed: Guess, usual: bool
) -> dict[str, Any]:
    """Return the recipe that classifies images with their size, colours and patches.

    usual: the user did not name the recipe, so that its augmentation may be changed: colour images are
    assumed to be photographs, which may be mirrored.
    """
    sizes, modes = _sampled(recipe, options)
    height, width = min(sizes)
    patch = [patch_side(height), patch_side(width)]
    if "image_size" not in options:
        size, why = [height // patch[0] * patch[0], width // patch[1] * patch[1]], "as they are"
        if len(sizes) > 1 or max(size) > LARGEST:
            why = "they have several sizes" if len(sizes) > 1 else f"of {height} x {width} pixels"
            size, patch = [LARGEST, LARGEST], [PATCH, PATCH]
        said = f"the middle of each image, {size[0]} x {size[1]}"
        guessed.explain("size", said, why, "--data.image_size '[H, W]'")
        recipe["data"]["image_size"] = size
    if "image_mode" not in options:
        recipe["data"]["image_mode"] = "rgb" if max(modes) > 1 else "grey"
        why = "some images have colours" if len({*modes}) > 1 else "as the images are"
        guessed.explain("colours", recipe["data"]["image_mode"], why, "--data.image_mode")
    mode = options.get("image_mode") or recipe["data"]["image_mode"]
    if "patch_size" not in recipe["model"]:
        guessed.explain(
            "patches", f"{patch[0]} x {patch[1]} pixels", "by the size", "--model.patch_size '[H, W]'"
        )
        recipe = merged(recipe, {"model": {"patch_size": patch}})
    if usual and mode == "rgb":
        way = "--task.augmentation.flip"
        guessed.explain("mirror images", "half of the training images", "they have colours", way)
        recipe = merged(recipe, {"task": {"augmentation": {"flip": 0.5, "rotation": 0.0}}})
    return recipe


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


def patch_side(side: int) -> int:
    """Return the side of patches for images of this side: at most `PATCH` and a fourth of the side."""
    return max(1, min(PATCH, side // 4))


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
