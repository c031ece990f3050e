"""Export a model as a graph for other runtimes: an ONNX file, or a file for torch.export.

The graph takes any number of texts and tokens. A decoder has its KV cache as input and output; an
encoder-decoder has a graph that reads the source, and one that writes the target with a cache; an encoder
computes windows, global tokens and BigBird's blocks in time proportional to the length. Prints how each layer
computes attention.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyformer.cli.commands.options import argument, option
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt

EXAMPLES = """examples:
  polyformer export gpt2-dir gpt2-onnx
  polyformer export model.gguf smollm2-onnx
  polyformer export translator-run translator-onnx
  polyformer export bert-dir bert-graph --format torch
  polyformer export classifier-dir out --head classify
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `polyformer export`."""

    model: str = argument(
        "checkpoint: a directory written by transformers or polyformer, a run, or a GGUF file",
        metavar="MODEL",
    )
    out: str = argument(
        "directory to write: the graph, config.json with the names of the labels, and the tokenizer",
        metavar="OUT",
        output="folder",
    )
    format: Literal["onnx", "torch"] = option(
        "onnx: model.onnx, or encoder_model.onnx and decoder_with_past_model.onnx of an encoder-decoder; "
        "torch: the same with .pt2, for torch.export.load (default: onnx)",
        "onnx",
    )
    no_cache: bool = option(
        "export a decoder, or an encoder-decoder as one graph, without a cache, to read whole texts", False
    )
    max_tokens: PositiveInt | None = option(
        "most tokens of a text (default: the model's positions)", metavar="N"
    )
    max_rows: PositiveInt | None = option("most texts per call (default: any number)", metavar="N")
    head: str | None = option("head to load, such as masked or embed (default: the one in the checkpoint)")


def run(options: ExportOptions) -> None:
    """Write the graph and the tokenizer."""
    from polyformer.cli.commands.run_settings import settings_of_run
    from polyformer.data.tokenizers.loading import load_tokenizer
    from polyformer.models.checkpoints import from_pretrained
    from polyformer.models.config import longest_text
    from polyformer.models.export import export_model
    from polyformer.models.export.exporting import write_description

    model = from_pretrained(options.model, options.head)
    if model.generation is None:
        model.generation = settings_of_run(options.model, model.config)
    bounds = {"max_tokens": options.max_tokens, "max_rows": options.max_rows}
    exported = export_model(model, options.out, options.format, cache=not options.no_cache, **bounds)
    print(exported)
    longest = min(exported.longest, longest_text(model.config) or exported.longest)
    write_description(model, Path(options.out), longest)
    try:
        load_tokenizer(options.model).save(options.out, longest)
    except InputError as error:
        print(f"no tokenizer written: {error}")
