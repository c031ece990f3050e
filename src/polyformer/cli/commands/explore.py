"""Write an interactive page of a model's attention on a text or an image: one file, which works offline.

The page shows every layer and head, the weights between tokens, the terms of each score, attention by
distance, and paths through the layers; with --effects also the effect of each head on each token. --target is
the decoder's input of an encoder-decoder; without it, or with --generate, the model generates text, and the
page shows the attention of each step. --against adds a second model or a second text to compare with.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyformer.cli.commands.options import Device, argument, device, model_settings, option
from polyformer.core.errors import InputError, quote
from polyformer.core.limits import NEW_TOKENS
from polyformer.core.ranges import PositiveFloat, PositiveInt

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
    from polyformer.cli.commands.explore_readings import is_model, open_model
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
