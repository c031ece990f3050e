"""Convert a checkpoint: to the other format, or to a model with another attention and room for longer texts.

FOLDER is a directory that transformers or polyformer wrote, or a name on the hub. In the end it is said which
weights were copied, extended by copying, and start fresh; `polyformer train --pretrained OUT` goes on.
"""

from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer convert bert-dir bert-polyformer
  polyformer convert runs/mine/ for-transformers --format hub
  polyformer convert bert-dir long --attention "Window(256) | Global(1)" --max-positions 4096
  polyformer convert roberta-dir out --attention "Window(256) | Marked()" --global-projections --format hub
  polyformer convert bert-dir low-rank --attention "linformer(k=128, max_length=512)"
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: str = argument("directory or hub name of a checkpoint")
    out: str = argument("directory to write")
    attention: str | None = option(
        "a pattern such as 'Window(256) | Global(1)', or a mechanism, for all layers"
    )
    max_positions: int | None = option("tokens that the new model takes")
    global_projections: bool = option("global tokens get projections of their own, copied", False)
    format: Literal["polyformer", "hub"] = option(
        "of what is written; 'hub' is what transformers reads", "polyformer"
    )
    head: str | None = option("head to load, such as 'masked' or 'BertForMaskedLM' (default: the saved one)")
    allow_pickle: bool = option(
        "read pytorch_model.bin, as tensors alone, where there is no safetensors", False
    )


def run(options: Options) -> None:
    from pathlib import Path

    from polyformer.checkpoints import convert, from_pretrained
    from polyformer.data import Tokenizer

    if Path(options.out).exists() and any(Path(options.out).iterdir()):
        raise InputError(f"{options.out}: not empty; choose another directory")
    model = from_pretrained(options.folder, options.head, allow_pickle=options.allow_pickle)
    if options.attention or options.max_positions or options.global_projections:
        model, report = convert(
            model,
            options.attention,
            max_positions=options.max_positions,
            global_projections=options.global_projections,
        )
        print(report)
    model.save_pretrained(options.out, format=options.format)
    print(f"written to {options.out} ({options.format})")
    try:
        tokenizer = Tokenizer.load(options.folder)
    except InputError as error:
        print(f"without a tokenizer: {error}")
        return
    tokenizer.save(options.out)
