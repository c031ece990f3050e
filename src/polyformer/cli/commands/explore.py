"""Write an interactive page of a model's attention on a text or an image: one file, which works offline.

The page shows every layer and head, the weights between tokens, the terms of each score, attention by
distance, and paths through the layers; with --effects also the effect of each head on each token. --target is
the decoder's input of an encoder-decoder; without it, or with --generate, the model generates text, and the
page shows the attention of each step. --against adds a second model or a second text to compare with.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.inputs import refuse_file_names
from polyformer.cli.commands.options import (
    Device,
    argument,
    device,
    model_settings,
    option,
    preset_overrides,
    refuse,
    set_options,
)
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import NEW_TOKENS, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import numpy as np

    from polyformer.cli.plots.explorer import Reading
    from polyformer.data import DataConfig

EXAMPLES = """examples:
  polyformer explore runs/demo-1 "def attend(q, k, v):" --out attention.html
  polyformer explore bert-dir "The cat sat." --against "The cat sat on the mat."
  polyformer explore bert-dir "The cat sat." --against long-dir       # before and after a conversion
  polyformer explore runs/translate "ein Haus" --target "a house"
  polyformer explore model.gguf --file page.txt --generate 8 --cache "snapkv(budget=64)"
  polyformer explore phi-dir "Hello" --transformers                   # any model of transformers
  polyformer explore runs/digits digit.png                            # a model of images
  polyformer explore runs/digits --row 3                              # the third training image
  polyformer explore runs/pets photo.jpg                              # patches of a Vision Transformer
  polyformer explore vit-dir photo.jpg --transformers
"""


@dataclass(frozen=True, kw_only=True)
class ExploreOptions:
    """Options of `polyformer explore`."""

    model: str = argument(
        "folder of a trained run, or of a model with its tokenizer; a GGUF file; or a preset, with random "
        "weights"
    )
    text: str | None = argument(
        "input text (or --file); for an image model an image file, or with --row a data set of images",
        None,
        metavar="TEXT|IMAGE",
    )
    file: str | None = option("read the input text from this file", metavar="FILE")
    row: PositiveInt | None = option(
        "read image N, from 1, of the data set IMAGE (default: of the run's training data)", metavar="N"
    )
    target: str | None = option("for an encoder-decoder: input of the decoder", metavar="TEXT")
    generate: PositiveInt | None = option("generate at most N tokens and show the steps", most=NEW_TOKENS)
    segment: PositiveInt | None = option(
        "for a model with a memory: read the text in segments of N tokens and show the last segment",
        metavar="N",
    )
    cache: str | None = option(
        "with --generate: policy that drops keys, such as 'snapkv(budget=64)'; the page shows the kept keys",
        metavar="POLICY",
    )
    effects: bool = option(
        "for a decoder: add the effect of each head on the probability of each token (a pass per head)",
        False,
    )
    against: str | None = option(
        "model (a folder or a GGUF file), text or image to compare with", metavar="MODEL|TEXT|IMAGE"
    )
    transformers: bool = option("load the model with transformers' AutoModel, without conversion", False)
    megabytes: PositiveFloat = option(
        "largest size of the page; further layers have only thumbnails (default: 20)", 20.0
    )
    out: str = option("file to write (default: explorer.html)", "explorer.html", "FILE", "file")
    device: Device = device()
    changes: dict[str, Any] = model_settings()


def run(options: ExploreOptions) -> None:
    """Record the attention and write the page."""
    from polyformer.cli.plots.explorer import page_of
    from polyformer.cli.plots.explorer.notebook import with_effects
    from polyformer.core.files import write_output

    text, other = text_of(options), options.against
    read = open_model(options, options.model)
    readings = [read(text)]
    if other is not None and is_model(other):
        readings.append(open_model(options, other)(text))
    elif other is not None:  # one model: name the readings after the texts
        readings.append(read(other))
        names = (page_title(options, text), excerpt(other))
        readings = [replace(reading, name=name) for reading, name in zip(readings, names)]
    if options.effects:
        readings = [with_effects(reading) for reading in readings]
    title = page_title(options, text)
    content = page_of(*readings, title=title, subtitle=options.model, megabytes=options.megabytes)
    write_output(options.out, content.encode())
    print(f"Written to {options.out} ({len(content) / 1e6:.1f} MB): open it in a browser")


def text_of(options: ExploreOptions) -> str | None:
    """Return TEXT or the content of --file, or None for an image of the run's data.

    Raises `InputError` for both, neither, or an empty text.
    """
    from polyformer.data.sources.files import lines_of, opened

    if options.text is None and options.file is None and options.row is not None:
        return None
    if (options.text is None) == (options.file is None):
        raise InputError("text: expected either TEXT or --file FILE")
    if options.file is not None:
        try:
            with opened(Path(options.file)) as file:
                text = "".join(lines_of(file, Path(options.file)))
        except InputError as error:
            raise InputError(f"--file: {error}") from error
    else:
        text = options.text or ""
    if not text.strip():
        raise InputError("text: expected a text, got only white space")
    return text


def page_title(options: ExploreOptions, text: str | None) -> str:
    """Return the title of the page: the first words of the text, or the number of the image."""
    row = "" if options.row is None else f"image {options.row}"
    return row if text is None else ", ".join(filter(None, [excerpt(text), row]))


def excerpt(text: str) -> str:
    """Return the first words of the text in quotes."""
    words = " ".join(text.split())
    return quote(words if len(words) <= 60 else f"{words[:57]}...")


Read = Callable[[str | None], "Reading"]
"""Returns the reading of a text, an image file or a data set of images; None stands for the run's images."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model and its reader: a tokenizer, or the processor of images of transformers.

    conversion: for a model of images the settings of the data that it reads; data: the images of its run.
    labels: the names of the labels of a classifier of images.
    """

    model: Any
    reader: Any = None
    conversion: dict[str, Any] | None = None
    data: "DataConfig | None" = None
    labels: tuple[str, ...] = ()


def open_model(options: Any, name: str) -> Read:
    """Load the model `name` and return its function from an input to a reading."""
    from polyformer.cli.plots.explorer.notebook import reading

    loaded = (by_transformers if options.transformers else by_polyformer)(options, name)
    if loaded.conversion is not None:
        check_images(options)
        return lambda path: image_reading(options, loaded, path, name)
    if options.text is not None:
        refuse_file_names("TEXT", (options.text,))
    settings = set_options(options, ("target", "generate", "segment", "cache"))
    return lambda text: reading(loaded.model, required_text(text), loaded.reader, settings, name)


def image_reading(options: Any, loaded: Loaded, path: str | None, name: str) -> "Reading":
    """Return the reading of the image that `image_of` returns, with its label if it is known."""
    from polyformer.cli.plots.explorer.notebook import reading

    pixels, label = image_of(options, loaded, path)
    read = reading(loaded.model, pixels, loaded.reader, {"labels": loaded.labels}, name)
    if read.prediction is None:
        return read
    return dataclasses.replace(read, prediction=dataclasses.replace(read.prediction, label=label))


def is_model(name: str) -> bool:
    """Return whether `name` is the folder or file of a model, not a text or an image."""
    from polyformer.core.foreign_checkpoints import SUFFIX

    # Unlike the methods of Path, these return False for a text that is too long for a file name.
    return os.path.isdir(name) or (name.lower().endswith(SUFFIX) and os.path.isfile(name))


def by_polyformer(options: Any, name: str) -> Loaded:
    """Load a model of polyformer."""
    from polyformer.cli.commands.inputs import load
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.recipes.run import Run, image_classifier
    from polyformer.training.tasks import ImageConfig, ImageModelling

    run = Run.open(name) if (Path(name) / RECIPE).is_file() else None
    data = None if run is None else run.recipe.data
    if run is not None and isinstance(run.recipe.task, ImageConfig):
        task = run.task_of(ImageModelling)
        if task.architecture.stacks != "decoder":
            raise InputError(
                f"{run.folder}: images are explored in a decoder of pixels or a classifier, got "
                f"an {task.architecture.stacks}; train a decoder by the recipe image"
            )
        height, width, *colours = task.shape
        conversion = {"image_size": (height, width), "image_mode": "rgb" if colours else "grey"}
        return Loaded(run.model(options.device), None, conversion, data)
    classifier = image_classifier(name, options.device)
    if classifier is None:
        source = load(name, None, options.device, preset_overrides(name, options.changes))
        return Loaded(source.model, source.tokenizer)
    task, model = classifier
    if options.row is not None and options.text is None and run is None:
        raise InputError(f"--row: {name} has no training images; name a file of images as IMAGE")
    conversion = {"image_size": task.rows.size, "image_mode": "grey" if task.config.channels == 1 else "rgb"}
    return Loaded(model, None, conversion, data, task.labels)


def by_transformers(options: Any, name: str) -> Loaded:
    """Load an unconverted model of transformers."""
    refuse(
        options, ("generate", "segment", "cache"), "only for models of polyformer; leave out --transformers"
    )
    image = options.row is not None or (options.text is not None and is_image(options.text))
    model, reader = load_from_transformers(name, image)
    return Loaded(model, reader, {"image_mode": "rgb"} if model.main_input_name == "pixel_values" else None)


def image_of(options: Any, loaded: Loaded, path: str | None) -> "tuple[np.ndarray, str]":
    """Return an image [H, W, C]: number --row, from 1, of a data set, or the single image in `path`.

    By default the data of the run. The second value is its label, "" if it is not known.
    """
    import numpy as np

    from polyformer.data import DataConfig, read

    own = loaded.data or DataConfig()
    data = own if path is None else DataConfig(format=None if is_image(path) else own.format)
    data = dataclasses.replace(data, streaming=True, test_fraction=0.0, **loaded.conversion or {})
    row = 1 if options.row is None or (path is not None and is_image(path)) else options.row
    label = ("label",) if path is None and loaded.labels else ()
    rows = iter(read(data, ("image", "height", "width", *label), path or own.path))
    wanted: Any = next(islice(rows, row - 1, None), None)
    if wanted is None:
        raise InputError(f"--row: {path or own.path or 'the default data'} has fewer than {row} images")
    pixels = np.frombuffer(wanted["image"], np.uint8).reshape(wanted["height"], wanted["width"], -1)
    return pixels, str(wanted.get("label", ""))


def load_from_transformers(name: str, image: bool) -> tuple[Any, Any]:
    """Return a model of transformers and its tokenizer or image processor.

    For a model of texts and images, return its part for an `image` or for text; for an `image` a classifier
    has its head. Raises `InputError` if
    transformers cannot load the model, and if weights are missing.
    """
    from polyformer.cli.plots.explorer.images import CLASSIFIER, part_for
    from polyformer.core.foreign_checkpoints import load_by_transformers

    kind = "AutoModel"
    architectures = load_by_transformers("AutoConfig", name).architectures if image else None
    if any(own.endswith(CLASSIFIER) for own in architectures or ()):
        kind += CLASSIFIER
    model, report = load_by_transformers(kind, name, output_loading_info=True)
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
    from polyformer.data.formats.images import SUFFIXES

    return Path(path).suffix.lower() in SUFFIXES


def check_images(options: Any) -> None:
    """Raise `InputError` for options of text models, and for --row with a single image."""
    if options.row is not None and options.text is not None and is_image(options.text):
        raise InputError(f"--row: {options.text} is a single image; leave out --row")
    why = "only for models of texts, and this model reads images; leave it out"
    refuse(options, ("file", "target", "generate", "segment", "cache"), why)
