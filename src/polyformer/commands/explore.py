"""Write a page on which a model's attention on a text is explored; it is one file and works offline.

The page shows every layer and head, the weights between tokens, the numbers behind each weight, attention by
distance, and paths through the layers. Of an encoder-decoder the second text is what the decoder reads; where
it is not given, and with --generate, the model writes it, and the page shows what each step looked at. With
--against a second model, or a second text, stands beside the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.commands.options import Device, argument, device, model_settings, option, preset_overrides
from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.visual.explorer import Reading

EXAMPLES = """examples:
  polyformer explore runs/demo-1 "def attend(q, k, v):" --out attention.html
  polyformer explore bert-dir "The cat sat." --against "The cat sat on the mat."
  polyformer explore bert-dir "The cat sat." --against long-dir       # before and after a conversion
  polyformer explore runs/translate "ein Haus" --target "a house"
  polyformer explore phi-dir "Hello" --transformers                   # any model of transformers
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer explore` takes."""

    model: str = argument(
        "folder of a trained run, or of a model with its tokenizer; a GGUF file; or a preset, with random "
        "weights"
    )
    text: str | None = argument("the text that it reads (or --file)", None, metavar="TEXT")
    file: str | None = option("read the text from this file", metavar="FILE")
    target: str | None = option("what the decoder of an encoder-decoder reads", metavar="TEXT")
    generate: int | None = option("let the model continue the text by at most N tokens, and show the steps")
    against: str | None = option(
        "another model (a folder or a GGUF file), or else another text, to compare with", metavar="MODEL|TEXT"
    )
    transformers: bool = option("read the model by transformers' AutoModel, without converting it", False)
    megabytes: float = option(
        "size of the page, at most; layers beyond have thumbnails alone (default: 20)", 20.0
    )
    out: str = option("file to write (default: explorer.html)", "explorer.html", "FILE")
    device: Device = device()
    changes: dict[str, Any] = model_settings()


def run(options: Options) -> None:
    """Record and write the page."""
    from polyformer.core.files import atomic_write
    from polyformer.visual.explorer import explore

    text = text_of(options)
    if options.megabytes <= 0:
        raise InputError(f"--megabytes: expected a size above 0, got {options.megabytes:g}")
    if options.generate is not None and options.generate < 1:
        raise InputError(f"--generate: expected 1 token or more, got {options.generate}")
    opened = by_transformers if options.transformers else by_us
    read = opened(options, options.model)
    readings = [read(text)]
    if options.against is not None and Path(options.against).exists():
        readings.append(opened(options, options.against)(text))
    elif options.against is not None:  # one model and two texts, which tell the readings apart
        readings.append(read(options.against))
        names = (shortened(text), shortened(options.against))
        readings = [replace(reading, name=name) for reading, name in zip(readings, names)]
    page = explore(*readings, title=shortened(text), subtitle=options.model, megabytes=options.megabytes)
    atomic_write(Path(options.out), page.encode())
    print(f"Written to {options.out} ({len(page) / 1e6:.1f} MB): open it in a browser")


def text_of(options: Options) -> str:
    """TEXT, or what --file holds; raises `InputError` for both, neither, or nothing in it."""
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


def by_us(options: Options, name: str) -> "Callable[[str], Reading]":
    """What a model of ours reads."""
    from polyformer.commands.model_and_texts import load
    from polyformer.visual.explorer.own_texts import OwnTexts

    source = load(name, None, options.device, preset_overrides(name, options.changes))
    texts = OwnTexts(name, source.model, source.tokenizer)
    return partial(texts.of_text, target=options.target, generate=options.generate)


def by_transformers(options: Options, name: str) -> "Callable[[str], Reading]":
    """What a model of transformers reads, as it is."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise InputError("--transformers: needs transformers; pip install 'polyformer[hub]'") from error
    from polyformer.visual.explorer.other_texts import OtherTexts

    if options.generate is not None:
        raise InputError("--generate: goes with models of ours; leave --transformers out")
    try:
        tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: transformers cannot read it: {str(error).splitlines()[0]}") from error
    return partial(OtherTexts(name, model, tokenizer).of_text, target=options.target)


def shortened(text: str) -> str:
    """A title: the first words of the text."""
    words = " ".join(text.split())
    return quote(words if len(words) <= 60 else f"{words[:57]}...")
