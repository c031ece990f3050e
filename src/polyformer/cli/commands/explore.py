"""Write a page to explore a model's attention on a text or an image: a single file that works offline.

The page shows every layer and head, the weights between tokens, the numbers behind each weight, attention by
distance, and paths through the layers. For an encoder-decoder the second text is the input of the decoder.
Without it, and with --generate, the model generates the text, and the page shows the attention of each step.
--against adds a second model or a second text for comparison.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyformer.cli.commands.options import Device, argument, device, model_settings, option
from polyformer.core.errors import InputError, quote
from polyformer.core.limits import NEW_TOKENS

EXAMPLES = """examples:
  polyformer explore runs/demo-1 "def attend(q, k, v):" --out attention.html
  polyformer explore bert-dir "The cat sat." --against "The cat sat on the mat."
  polyformer explore bert-dir "The cat sat." --against long-dir       # before and after a conversion
  polyformer explore runs/translate "ein Haus" --target "a house"
  polyformer explore phi-dir "Hello" --transformers                   # any model of transformers
  polyformer explore runs/digits digit.png                            # a model of images
  polyformer explore runs/digits --row 3                              # the third training image
  polyformer explore runs/pets photo.jpg                              # patches of a Vision Transformer
  polyformer explore vit-dir photo.jpg --transformers
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer explore` takes."""

    model: str = argument(
        "folder of a trained run, or of a model with its tokenizer; a GGUF file; or a preset, with random "
        "weights"
    )
    text: str | None = argument(
        "text to read (or --file); for an image model the file of an image, or with --row of a data "
        "set of images",
        None,
        metavar="TEXT|IMAGE",
    )
    file: str | None = option("read the text from this file", metavar="FILE")
    row: int | None = option(
        "read image N, from 1, of a data set; without IMAGE of the training data of the run", metavar="N"
    )
    target: str | None = option("input of the decoder, for an encoder-decoder", metavar="TEXT")
    generate: int | None = option(
        "continue the text by at most N tokens, and show the steps", most=NEW_TOKENS
    )
    segment: int | None = option(
        "for a model with a memory: read the text in segments of N tokens, and show the last segment",
        metavar="N",
    )
    against: str | None = option(
        "another model (a folder or a GGUF file), or another text or image, for comparison",
        metavar="MODEL|TEXT|IMAGE",
    )
    transformers: bool = option("load the model with transformers' AutoModel, without conversion", False)
    megabytes: float = option(
        "maximum size of the page; layers beyond it only have thumbnails (default: 20)", 20.0
    )
    out: str = option("file to write (default: explorer.html)", "explorer.html", "FILE", "file")
    device: Device = device()
    changes: dict[str, Any] = model_settings()


def run(options: Options) -> None:
    """Record and write the page."""
    from polyformer.cli.commands.explore_readings import is_model, opened
    from polyformer.cli.plots.explorer import page_of
    from polyformer.core.files import write_output

    text, other = text_of(options), options.against
    for name in ("generate", "row", "segment"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise InputError(f"--{name}: expected 1 or more, got {number}")
    if options.megabytes <= 0:
        raise InputError(f"--megabytes: expected a size above 0, got {options.megabytes:g}")
    read = opened(options, options.model)
    readings = [read(text)]
    if other is not None and is_model(other):
        readings.append(opened(options, other)(text))
    elif other is not None:  # one model and two texts, which tell the readings apart
        readings.append(read(other))
        names = (titled(options, text), shortened(other))
        readings = [replace(reading, name=name) for reading, name in zip(readings, names)]
    title = titled(options, text)
    content = page_of(*readings, title=title, subtitle=options.model, megabytes=options.megabytes)
    write_output(options.out, content.encode())
    print(f"Written to {options.out} ({len(content) / 1e6:.1f} MB): open it in a browser")


def text_of(options: Options) -> str | None:
    """TEXT, or what --file holds, or None for an image of the run's data; raises `InputError` for both,
    neither, or nothing in it."""
    if options.text is None and options.file is None and options.row is not None:
        return None
    if (options.text is None) == (options.file is None):
        raise InputError("text: expected TEXT or --file FILE, one of the two")
    if options.file is not None:
        try:
            text = Path(options.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--file: {options.file} is no text that can be read: {error}") from error
    else:
        text = options.text or ""
    if not text.strip():
        raise InputError("text: expected one or more words, got nothing")
    return text


def titled(options: Options, text: str | None) -> str:
    """What the page is called: the text's first words, or which image it is."""
    row = "" if options.row is None else f"image {options.row}"
    return row if text is None else ", ".join(filter(None, [shortened(text), row]))


def shortened(text: str) -> str:
    """A title: the first words of the text."""
    words = " ".join(text.split())
    return quote(words if len(words) <= 60 else f"{words[:57]}...")
