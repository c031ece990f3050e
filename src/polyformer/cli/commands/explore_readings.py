"""What `polyformer explore` reads, a text or an image: models of ours and of transformers, loaded once."""

import dataclasses
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import preset_overrides
from polyformer.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from polyformer.cli.plots.explorer import Reading
    from polyformer.data import DataConfig
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks import ImageClassification

Read = Callable[[str | None], "Reading"]
"""A text, or the file of an image or of a data set of images; None for a run's own images."""


def opened(options: Any, name: str) -> Read:
    """What the model `name` reads."""
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
    return by_us(options, name)


def is_model(name: str) -> bool:
    """Whether it is a model's folder or file, and neither a text nor an image."""
    from polyformer.core.gguf import SUFFIX

    # Unlike Path's, these say no of a text that is too long for a name.
    return os.path.isdir(name) or (name.lower().endswith(SUFFIX) and os.path.isfile(name))


def by_us(options: Any, name: str) -> Read:
    """Texts, by a model of ours."""
    from polyformer.cli.commands.model_and_texts import load
    from polyformer.cli.plots.explorer.own_texts import OwnTexts

    source = load(name, None, options.device, preset_overrides(name, options.changes))
    texts = OwnTexts(name, source.model, source.tokenizer)
    return lambda text: texts.of_text(some_text(text), options.target, options.generate, options.segment)


def by_image_run(options: Any, run: "Run") -> Read:
    """Images, by the model of a run of ours, brought to the size and the colours that it was trained on."""
    from polyformer.cli.plots.explorer.own_images import OwnImages
    from polyformer.training.tasks.image import ImageModelling

    check_images(options)
    task = run.task_of(ImageModelling)
    height, width, *colours = task.shape
    images = OwnImages(str(run.folder), run.model(options.device), task.levels)
    brought = {"image_size": (height, width), "image_mode": "rgb" if colours else "grey"}
    return lambda path: images.of_pixels(image_of(options, run.recipe.data, brought, path))


def by_patches(options: Any, name: str, task: "ImageClassification", model: Any) -> Read:
    """Read images by a Vision Transformer of ours, brought to the size and the colours that it reads."""
    from polyformer.cli.plots.explorer.own_patches import OwnPatches
    from polyformer.data import DataConfig
    from polyformer.models.architectures.training_record import RECIPE
    from polyformer.training.recipes.run import Run

    check_images(options)
    images, is_run = OwnPatches(name, model), (Path(name) / RECIPE).is_file()
    if options.row is not None and options.text is None and not is_run:
        raise InputError(f"--row: {name} has no images of its own; name a file of images before it")
    own = Run.open(name).recipe.data if is_run else DataConfig()
    brought = {"image_size": task.size, "image_mode": "grey" if task.config.channels == 1 else "rgb"}
    return lambda path: images.of_pixels(image_of(options, own, brought, path))


def image_of(options: Any, own: "DataConfig", brought: dict[str, Any], path: str | None) -> "np.ndarray":
    """Return the image that is asked for, of a run's `own` data or of those in `path`, as `brought` says."""
    from polyformer.data import DataConfig

    if path is None:
        data = dataclasses.replace(own, streaming=True, test_fraction=0.0, **brought)
        return pixels_of(data, own.path, options.row)
    data = DataConfig(format=None if is_image(path) else own.format, streaming=True, **brought)
    return pixels_of(data, path, options.row)


def by_transformers(options: Any, name: str) -> Read:
    """Texts or images, by a model of transformers as it is."""
    from polyformer.cli.plots.explorer.other_images import OtherImages
    from polyformer.cli.plots.explorer.other_texts import OtherTexts
    from polyformer.data import DataConfig

    for option in ("generate", "segment"):
        if getattr(options, option) is not None:
            raise InputError(f"--{option}: goes with models of ours; leave --transformers out")
    image = options.row is not None or (options.text is not None and is_image(options.text))
    model, reader = loaded(name, image)
    if model.main_input_name != "pixel_values":
        texts = OtherTexts(name, model, reader)
        return lambda text: texts.of_text(some_text(text), options.target)
    check_images(options)
    images = OtherImages(name, model, reader)
    data = DataConfig(streaming=True, image_mode="rgb")
    return lambda path: images.of_pixels(pixels_of(data, path, options.row))


def loaded(name: str, image: bool) -> tuple[Any, Any]:
    """Return a model of transformers and its tokenizer or image processor.

    Of a model that reads texts and images, return its part for an `image` or a text. Raises `InputError` for
    what transformers cannot load, and for files that lack weights.
    """
    from polyformer.cli.plots.explorer.other_images import part_for
    from polyformer.core.transformers_loading import load_by_transformers

    model, report = load_by_transformers("AutoModel", name, output_loading_info=True)
    model = part_for(model, image)
    vision = model.main_input_name == "pixel_values"
    reader = load_by_transformers("AutoImageProcessor" if vision else "AutoTokenizer", name)
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise InputError(
            f"{name}: its files lack {len(missing)} tensors of {type(model).__name__}, {missing[0]} among "
            "them, and random numbers would be shown in their place; take a whole checkpoint"
        )
    return model, reader


def some_text(text: str | None) -> str:
    """A text, of which there must be some."""
    if text is None:
        raise InputError("--row: goes with a model of images; of this one give a TEXT")
    return text


def is_image(path: str) -> bool:
    """Whether it is the file of one image, by its name."""
    from polyformer.data.image_decoding import SUFFIXES

    return Path(path).suffix.lower() in SUFFIXES


def check_images(options: Any) -> None:
    """Raises `InputError` for options of texts, where the model reads images, and for a row of one image."""
    if options.row is not None and options.text is not None and is_image(options.text):
        raise InputError(f"--row: {options.text} is one image; leave it out")
    for name in ("file", "target", "generate", "segment"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name}: goes with a text, and this model reads images; leave it out")


def pixels_of(data: "DataConfig", path: str | None, row: int | None) -> "np.ndarray":
    """The image `row`, from 1, of a source, or the one that it is: [H, W, C]."""
    import numpy as np

    from polyformer.data import read

    row = 1 if row is None or (path is not None and is_image(path)) else row
    rows = iter(read(data, ("image", "height", "width"), path))
    wanted: Any = next(islice(rows, row - 1, None), None)
    if wanted is None:
        raise InputError(f"--row: {path or 'the default data'} has fewer than {row} images")
    return np.frombuffer(wanted["image"], np.uint8).reshape(wanted["height"], wanted["width"], -1)
