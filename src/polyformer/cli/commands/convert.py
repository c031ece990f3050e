"""Commands that write a trained model in another form: convert, export.

A conversion may include training: exits fitted in closed form, and a new attention that learns from the old.
For other libraries, a run that translates or summarizes has its generation settings written with it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import argument, option
from polyformer.core.errors import InputError
from polyformer.core.paths import checked_path
from polyformer.core.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from polyformer.models.architectures import Transformer

CONVERT_EXAMPLES = """examples:
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


def run_convert(options: ConvertOptions) -> None:
    """Convert a checkpoint to another format, or to a model with another attention, memory, depth or length.

    Prints which weights are copied, extended by copying, or newly initialized. Train the result further with
    `polyformer train --pretrained OUT`. With --evaluate, also compares the models on a text before and after
    the conversion: perplexity (of masked tokens for an encoder; for an embedding model the similarity of its
    vectors), speed and memory, and with --recall whether they find numbers hidden in the text. If the quality
    loss exceeds --tolerance, the exit status is 1; the model is still written.
    """
    from polyformer.cli.commands.before_after import check_evaluation, show_evaluation
    from polyformer.models.architectures.weights import with_weights
    from polyformer.models.checkpoints import convert, from_pretrained

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
    _save_tokenizer(options, before, model)
    if options.evaluate is not None:
        show_evaluation(options, before, model)


def _save_tokenizer(options: ConvertOptions, before: Any, model: Any) -> None:
    """Write the tokenizer of the model `before` for the converted model, or print why there is none."""
    from polyformer.data.tokenizers import load_tokenizer
    from polyformer.models.config import longest_text

    try:
        tokenizer = load_tokenizer(options.folder)
        if before.config.origin is not None and model.config.origin is None:
            tokenizer.fix_special_tokens()  # the converted model looks like one that was trained here
        tokenizer.save(options.out, longest_text(model.config))
    except InputError as error:
        print(f"no tokenizer written: {error}")


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


FIT_LENGTH = 256
"""Tokens per row of the text that exits are fitted to."""


def fit(options: Any, model: "Transformer") -> None:
    """Fit the exits of `model` to the text --fit in place; print the errors left."""
    from polyformer.applications.exit_fitting import fit_exits, fittable_exits

    fittable_exits(model)
    if options.fit_tokens < 2 * FIT_LENGTH:
        raise InputError(f"--fit-tokens: expected {2 * FIT_LENGTH} or more, got {options.fit_tokens}")
    rows = rows_of_text(model, options.folder, options.fit, FIT_LENGTH, options.fit_tokens)

    def show(read: int) -> None:
        print(f"\r{read:,} of {len(rows) * FIT_LENGTH:,} tokens", end="", file=sys.stderr, flush=True)

    fitted = fit_exits(model, rows, show)
    print(file=sys.stderr)
    for exit in fitted:
        print(
            f"exit after layer {exit.layer}: divergence from the last layer on held-out rows "
            f"{exit.divergence:.3f} nats, before the fit {exit.before:.3f} (ridge {exit.ridge:g})"
        )


TRANSFER_LENGTH = 512
"""Tokens per row of the text that a new attention learns from."""


def learn_attention(options: Any, old: "Transformer", new: "Transformer") -> "Transformer":
    """Return `new` after attention transfer from `old` and low-rank tuning on a text; print the losses."""
    from polyformer.applications.linearizing import Steps, check_tunable, transfer_attention, tune_low_rank
    from polyformer.training.recipes.run import choose_device

    # The transfer takes minutes, so a model that cannot be tuned is refused before it.
    if options.tune_tokens:
        check_tunable(new)
    longest = max(options.transfer_tokens, options.tune_tokens)
    rows = rows_of_text(new, options.folder, options.transfer, TRANSFER_LENGTH, longest)
    device = choose_device("auto")
    old, new = old.to(device), new.to(device)

    def show(read: int, loss: float) -> None:
        print(f"\r{read:,} tokens, loss {loss:.3f} ", end="", file=sys.stderr, flush=True)

    steps = Steps(rows, options.transfer_tokens, precision=options.precision)
    losses = transfer_attention(old, new, steps, show)
    print(file=sys.stderr)
    worst = max(range(len(losses)), key=losses.__getitem__)
    mean = sum(losses) / len(losses)
    print(f"attention transfer: error {mean:.3f} of the old output, {losses[worst]:.3f} in layer {worst}")
    if options.tune_tokens:
        new = tune_low_rank(new, Steps(rows, options.tune_tokens, precision=options.precision), show)
        print(file=sys.stderr)
    old.cpu()
    return new.cpu()


def rows_of_text(model: "Transformer", folder: str, text: str, length: int, tokens: int) -> list[list[int]]:
    """Return rows of `length` tokens, at most `tokens` in all, of a text by the tokenizer in `folder`."""
    from polyformer.cli.commands.inputs import ModelAndTexts, token_rows
    from polyformer.data import DataConfig
    from polyformer.data.tokenizers import load_tokenizer

    source = ModelAndTexts(model, load_tokenizer(folder), DataConfig(path=text), ("text",))
    return token_rows(source, "text", length, max(1, tokens // length))


EXPORT_EXAMPLES = """examples:
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


def run_export(options: ExportOptions) -> None:
    """Export a model as a graph for other runtimes: an ONNX file, or a file for torch.export.

    The graph takes any number of texts and tokens. A decoder has its KV cache as input and output; an
    encoder-decoder has a graph that reads the source, and one that writes the target with a cache; an encoder
    computes windows, global tokens and BigBird's blocks in time proportional to the length. Prints how each
    layer computes attention.
    """
    from polyformer.data.tokenizers import load_tokenizer
    from polyformer.models.checkpoints import from_pretrained
    from polyformer.models.config import longest_text
    from polyformer.models.export import export_model, write_description

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


def settings_of_run(folder: str, config: Any) -> dict[str, Any] | None:
    """Return the generation settings of a run that translates or summarizes, with the special tokens of the
    model's `config`; None for other models.
    """
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks import SequenceToSequence

    if not (checked_path(folder) / RECIPE).is_file():
        return None
    run = Run.open(folder)
    if not issubclass(run.recipe.task.task, SequenceToSequence):
        return None
    tokens = config.special.eos, config.special.pad, config.special.bos
    names = "eos_token_id", "pad_token_id", "decoder_start_token_id"
    special = {name: token for name, token in zip(names, tokens) if token is not None}
    return {**special, **run.task_of(SequenceToSequence).generation_settings()}
