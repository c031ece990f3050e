"""Models for `polyformer explore`, of polyformer or of transformers, that read texts or images."""

import dataclasses
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import preset_overrides, refuse
from polyformer.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from polyformer.cli.plots.explorer import Reading
    from polyformer.data import DataConfig
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks import ImageClassification

Read = Callable[[str | None], "Reading"]
"""Returns the reading of a text, an image file or a data set of images; None stands for the run's images."""


def open_model(options: Any, name: str) -> Read:
    """Load the model `name` and return its function from an input to a reading."""
    from polyformer.models.architectures.training_record import RECIPE
    from polyformer.training.recipes.classifier import image_classifier
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks import ImageConfig

    if options.transformers:
        return by_transformers(options, name)
    if (Path(name) / RECIPE).is_file() and isinstance(Run.open(name).recipe.task, ImageConfig):
        return by_image_run(options, Run.open(name))
    classifier = image_classifier(name, options.device)
    if classifier is not None:
        return by_patches(options, name, *classifier)
    return by_polyformer(options, name)


def is_model(name: str) -> bool:
    """Return whether `name` is the folder or file of a model, not a text or an image."""
    from polyformer.core.gguf import SUFFIX

    # Unlike the methods of Path, these return False for a text that is too long for a file name.
    return os.path.isdir(name) or (name.lower().endswith(SUFFIX) and os.path.isfile(name))


def by_polyformer(options: Any, name: str) -> Read:
    """Read texts with a model of polyformer."""
    from polyformer.cli.commands.model_and_texts import load
    from polyformer.cli.plots.explorer.polyformer_texts import PolyformerTexts

    source = load(name, None, options.device, preset_overrides(name, options.changes))
    texts = PolyformerTexts(name, source.model, source.tokenizer)
    return lambda text: texts.of_text(
        required_text(text), options.target, options.generate, options.segment, options.cache
    )


def by_image_run(options: Any, run: "Run") -> Read:
    """Read images with the image model of a run, converted to the size and colors of its training."""
    from polyformer.cli.plots.explorer.polyformer_images import PolyformerImages
    from polyformer.training.tasks.image import ImageModelling

    check_images(options)
    task = run.task_of(ImageModelling)
    if task.stacks != "decoder":
        raise InputError(
            f"{run.folder}: images are explored in a decoder of pixels or a classifier, got "
            f"an {task.stacks}; train a decoder by the recipe image"
        )
    height, width, *colours = task.shape
    images = PolyformerImages(str(run.folder), run.model(options.device), task.levels)
    conversion = {"image_size": (height, width), "image_mode": "rgb" if colours else "grey"}
    return lambda path: images.of_pixels(image_of(options, run.recipe.data, conversion, path))


def by_patches(options: Any, name: str, task: "ImageClassification", model: Any) -> Read:
    """Read images with a Vision Transformer of polyformer, converted to its size and colors."""
    from polyformer.cli.plots.explorer.polyformer_images import PolyformerPatches
    from polyformer.data import DataConfig
    from polyformer.models.architectures.training_record import RECIPE
    from polyformer.training.recipes.run import Run

    check_images(options)
    images, is_run = PolyformerPatches(name, model), (Path(name) / RECIPE).is_file()
    if options.row is not None and options.text is None and not is_run:
        raise InputError(f"--row: {name} has no training images; name a file of images as IMAGE")
    own = Run.open(name).recipe.data if is_run else DataConfig()
    conversion = {"image_size": task.size, "image_mode": "grey" if task.config.channels == 1 else "rgb"}
    return lambda path: images.of_pixels(image_of(options, own, conversion, path))


def image_of(options: Any, own: "DataConfig", conversion: dict[str, Any], path: str | None) -> "np.ndarray":
    """Return the image --row of the run's data, or the image in `path`, converted as `conversion` defines."""
    from polyformer.data import DataConfig

    if path is None:
        data = dataclasses.replace(own, streaming=True, test_fraction=0.0, **conversion)
        return pixels_of(data, own.path, options.row)
    data = DataConfig(format=None if is_image(path) else own.format, streaming=True, **conversion)
    return pixels_of(data, path, options.row)


def by_transformers(options: Any, name: str) -> Read:
    """Read texts or images with an unconverted model of transformers."""
    from polyformer.cli.plots.explorer.transformers_images import TransformersImages
    from polyformer.cli.plots.explorer.transformers_texts import TransformersTexts
    from polyformer.data import DataConfig

    refuse(
        options, ("generate", "segment", "cache"), "only for models of polyformer; leave out --transformers"
    )
    image = options.row is not None or (options.text is not None and is_image(options.text))
    model, reader = load_from_transformers(name, image)
    if model.main_input_name != "pixel_values":
        texts = TransformersTexts(name, model, reader)
        return lambda text: texts.of_text(required_text(text), options.target)
    check_images(options)
    images = TransformersImages(name, model, reader)
    data = DataConfig(streaming=True, image_mode="rgb")
    return lambda path: images.of_pixels(pixels_of(data, path, options.row))


def load_from_transformers(name: str, image: bool) -> tuple[Any, Any]:
    """Return a model of transformers and its tokenizer or image processor.

    For a model of texts and images, return its part for an `image` or for text. Raises `InputError` if
    transformers cannot load the model, and if weights are missing.
    """
    from polyformer.cli.plots.explorer.transformers_images import part_for
    from polyformer.core.transformers_loading import load_by_transformers

    model, report = load_by_transformers("AutoModel", name, output_loading_info=True)
    model = part_for(model, image)
    vision = model.main_input_name == "pixel_values"
    reader = load_by_transformers("AutoImageProcessor" if vision else "AutoTokenizer", name)
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise InputError(
            f"{name}: {len(missing)} tensors of {type(model).__name__} are missing, such as "
            f"{missing[0]}, and the page would show random weights; use a complete checkpoint"
        )
    return model, reader


def required_text(text: str | None) -> str:
    """Return the text; raise `InputError` if there is none."""
    if text is None:
        raise InputError("--row: only for image models; give this model a TEXT")
    return text


def is_image(path: str) -> bool:
    """Return whether the name is that of an image file."""
    from polyformer.data.image_decoding import SUFFIXES

    return Path(path).suffix.lower() in SUFFIXES


def check_images(options: Any) -> None:
    """Raise `InputError` for options of text models, and for --row with a single image."""
    if options.row is not None and options.text is not None and is_image(options.text):
        raise InputError(f"--row: {options.text} is a single image; leave out --row")
    why = "only for models of texts, and this model reads images; leave it out"
    refuse(options, ("file", "target", "generate", "segment", "cache"), why)


def pixels_of(data: "DataConfig", path: str | None, row: int | None) -> "np.ndarray":
    """Return an image [H, W, C]: number `row`, from 1, of a data set, or the single image in `path`."""
    import numpy as np

    from polyformer.data import read

    row = 1 if row is None or (path is not None and is_image(path)) else row
    rows = iter(read(data, ("image", "height", "width"), path))
    wanted: Any = next(islice(rows, row - 1, None), None)
    if wanted is None:
        raise InputError(f"--row: {path or 'the default data'} has fewer than {row} images")
    return np.frombuffer(wanted["image"], np.uint8).reshape(wanted["height"], wanted["width"], -1)
