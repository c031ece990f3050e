"""Convert a checkpoint to another format, or to a model with another attention, memory, depth or length.

Prints which weights are copied, extended by copying, or newly initialized. Train the result further with
`polyformer train --pretrained OUT`. With --evaluate, also compares the models on a text before and after the
conversion: perplexity (of masked tokens for an encoder; for an embedding model the similarity of its
vectors), speed and memory, and with --recall whether they find numbers hidden in the text. If the quality
loss exceeds --tolerance, the exit status is 1; the model is still written.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyformer.cli.commands.options import argument, option
from polyformer.core.errors import InputError
from polyformer.core.paths import checked_path
from polyformer.core.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt

EXAMPLES = """examples:
  polyformer convert bert-dir bert-polyformer
  polyformer convert runs/mine/ for-transformers --format hub
  polyformer convert gpt2-dir gpt2-int8 --weights int8
  polyformer convert bert-dir long --attention "Window(256) | Global(1)" --max-positions 4096
  polyformer convert llama-dir longer --max-positions 32768 --extension yarn --evaluate book.txt
  polyformer convert gpt2-dir windowed --attention "Window(256) | Global(4)" --evaluate book.txt --recall 20
  polyformer convert minilm-dir long --head embed --max-positions 4096 --attention "Window(128) | Global(1)" \
      --format wrapped
  polyformer convert roberta-dir out --attention "Window(256) | Marked()" --global-projections --format hub
  polyformer convert bert-dir low-rank --attention "linformer(k=128, max_length=512)"
  polyformer convert runs/mine memorizing --memory "memorizing(length=256, store=8192)"
  polyformer convert runs/mine with-exits --depth "exits(layers=[2, 4], alone=true)"
  polyformer convert smollm2 linear --attention gated_delta --transfer train.txt --tune-tokens 500000
  polyformer convert smollm2 with-exits --depth "exits(layers=[20, 25], translation=linear, rule=shortlist)" \
      --fit train.txt
"""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `polyformer convert`."""

    folder: str = argument(
        "checkpoint: a directory written by transformers or polyformer, or a name on the hub",
        metavar="CHECKPOINT",
    )
    out: str = argument("directory to write", metavar="OUT", output="folder")
    attention: str | None = option(
        "attention of all layers: a pattern such as 'Window(256) | Global(1)', or a mechanism such "
        "as linformer"
    )
    cross_attention: str | None = option(
        "pattern of a decoder's attention to its source, such as 'Aligned(ratio=1.0, left=16, right=16)'"
    )
    max_positions: int | None = option("largest number of tokens per text of the new model")
    extension: str | None = option(
        "extension of rotary positions to texts longer than in training: interpolation, ntk, yarn or llama3; "
        "dynamic or self_extend, which do not change shorter texts; with options such as 'yarn(factor=4)' "
        "(default factor: from --max-positions)"
    )
    global_projections: bool = option(
        "give global tokens separate query, key and value projections, initialized with copies", False
    )
    memory: str | None = option(
        "memory for a decoder: sinks, a bounded cache that needs no training, such as 'sinks(length=508)'; "
        "or a memory of earlier segments, recurrent, compressive or memorizing: train it further with "
        "--task.feed in_order"
    )
    depth: str | None = option(
        "depth of the decoder: act, or early exits such as 'exits(layers=[4, 8], alone=true)', which need a "
        "short training and `polyformer calibrate`"
    )
    fit: str | None = option(
        "text to fit a decoder's exits to in closed form: linear maps by ridge regression on the hidden "
        "states of the last layer, the most frequent tokens for the rule shortlist",
        metavar="TEXT",
    )
    fit_tokens: int = option("with --fit: largest number of tokens to read (default: 32768)", 32_768)
    transfer: str | None = option(
        "text on which the new attention learns to return what the old attention returns, layer by layer",
        metavar="TEXT",
    )
    transfer_tokens: PositiveInt = option("with --transfer: tokens to learn from (default: 500000)", 500_000)
    tune_tokens: NonNegativeInt = option(
        "with --transfer, for a decoder: then tune all projections by matrices of rank 8 on N tokens of "
        "the text (default: 0)",
        0,
    )
    precision: Literal["no", "bf16"] = option(
        "with --transfer: precision of training; bf16 is faster on a GPU or a CPU with bfloat16 products "
        "(default: no, which is float32)",
        "no",
    )
    weights: Literal["float32", "bfloat16", "int8", "int4", "stored"] | None = option(
        "number format of the weights; int8 takes a quarter of the memory of float32, int4 a sixth; "
        "both generate faster, but cannot be trained; stored keeps the 4-bit numbers of a GGUF file "
        "(default: unchanged)"
    )
    format: Literal["polyformer", "hub", "wrapped"] = option(
        "format to write; hub: for transformers, for models of its families; wrapped: for transformers with "
        "trust_remote_code, for any model (default: polyformer)",
        "polyformer",
    )
    head: str | None = option(
        "head to load, such as masked or BertForMaskedLM (default: the one in the checkpoint)"
    )
    evaluate: str | None = option(
        "compare the models on this text before and after the conversion", metavar="TEXT"
    )
    lengths: str | None = option(
        "with --evaluate: lengths of the pieces of text, in tokens (default: the number of positions of the "
        "old and of the new model, at most 4096)",
        metavar="N,N,...",
    )
    tokens: PositiveInt = option("with --evaluate: tokens to read at each length (default: 16384)", 16_384)
    recall: PositiveInt | None = option(
        "with --evaluate, for a decoder: also hide N numbers in the text, each in a prompt of the length, "
        "and report the share that the models find, as `polyformer probe` with the task niah_single_2"
    )
    tolerance: NonNegativeFloat = option(
        "with --evaluate: accepted relative increase of perplexity, or decrease of similarity or recall "
        "(default: 0.05)",
        0.05,
    )
    allow_pickle: bool = option("read pytorch_model.bin (tensors only) if there are no safetensors", False)


def run(options: ConvertOptions) -> None:
    """Write the converted checkpoint and its tokenizer; exit with status 1 if it lost too much quality."""
    from polyformer.cli.commands.before_after import check_evaluation, show_evaluation
    from polyformer.cli.commands.convert_training import fit, learn_attention
    from polyformer.cli.commands.run_settings import settings_of_run
    from polyformer.data.tokenizers.loading import load_tokenizer
    from polyformer.models.architectures.weights import with_weights
    from polyformer.models.checkpoints import convert, from_pretrained
    from polyformer.models.config import longest_text

    if options.recall is not None and options.evaluate is None:
        raise InputError("--recall: requires --evaluate TEXT")
    out = checked_path(options.out)
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{options.out}: the directory is not empty; choose another one")
    if options.transfer is not None and options.attention is None:
        raise InputError("--transfer: requires --attention, the attention that learns")
    changes = options.attention, options.cross_attention, options.max_positions, options.extension
    changed = any(changes) or options.global_projections or options.memory or options.depth or options.fit
    # Rounding comes last: new parameters are computed from weights that are not yet rounded.
    weights = None if changed and options.weights in ("int8", "int4") else options.weights
    model = from_pretrained(options.folder, options.head, weights=weights, allow_pickle=options.allow_pickle)
    if model.generation is None:
        model.generation = settings_of_run(options.folder, model.config)
    before = model
    if options.evaluate is not None:
        check_evaluation(options, before)
    if changed:
        model, report = convert(
            model,
            options.attention,
            cross_attention=options.cross_attention,
            max_positions=options.max_positions,
            extension=options.extension,
            global_projections=options.global_projections,
            memory=options.memory,
            depth=options.depth,
        )
        print(report)
    if options.fit is not None:
        fit(options, model)
    if options.transfer is not None:
        model = learn_attention(options, before, model)
    if options.weights is not None:
        model = with_weights(model, options.weights)
    _save(model, Path(options.out), options.format)
    print(f"written to {options.out} ({options.format})")
    try:
        load_tokenizer(options.folder).save(options.out, longest_text(model.config))
    except InputError as error:
        print(f"no tokenizer written: {error}")
    if options.evaluate is not None:
        show_evaluation(options, before, model)


def _save(model: Any, folder: Path, format: str) -> None:
    """Write the model and its card, and for a wrapped embedding model the files of sentence-transformers."""
    from polyformer.models.architectures.model_card import write_export_card
    from polyformer.models.checkpoints.folder_files import write_modules
    from polyformer.models.config import ModelConfig

    if format != "wrapped":
        model.save_pretrained(folder, format=format)
        write_export_card(model, folder, format)
        return
    from polyformer.models.transformers import wrap

    wrap(model).save_pretrained(folder)
    if isinstance(model.config, ModelConfig):
        write_modules(model.config, folder)
