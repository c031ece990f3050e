"""Show a model's parameters, costs and modules, or a picture of an attention pattern or a position scheme.

For a model: parameters, memory, FLOPs (a multiply-add counts as two) and cache by text length or for an
image, and the modules. With --mesh: predicted memory and communication of each process in distributed
training. For a pattern: the keys that each query attends to. For a position scheme: its effect on the scores
or the input.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import (
    argument,
    model_settings,
    option,
    preset_overrides,
    refuse,
    set_options,
)
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from rich.table import Table

    from polyformer.cli.plots.model import Cost
    from polyformer.models.architectures import AnyConfig, Transformer
    from polyformer.models.config import ModelConfig
    from polyformer.training.distributed.predict import Prediction
    from polyformer.training.distributed.predict_local import TrainingSetup


EXAMPLES = """examples:
  polyformer show gpt2
  polyformer show gpt2 --model.attention "Window(128)" --model.position rope
  polyformer show runs/demo-1
  polyformer show llama-2-7b --mesh data=8,shard=8,tensor=2 --batch 16 --length 8192
  polyformer show pattern "Window(8) | Global(2)" --length 64
  polyformer show pattern "PerHead([Window(8), Full])" --causal --out heads.svg
  polyformer show pattern "Window(3) | Global(1)" --paths
  polyformer show position alibi --length 64 --out alibi.png
  polyformer show position "{kind: rope, base: 500}"
"""

MESH = "batch", "accumulate", "precision"
PICTURE = "length", "heads", "causal", "block", "layer", "paths", "out"

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LONGEST_REAL_PASS = 1024
"""The most tokens of a pass that computes numbers, which takes seconds."""

SHORTER = (64, 32, 16, 8, 4)
"""The numbers of tokens for which costs are shown; a model that cannot take the first is shown shorter."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `polyformer show`."""

    subject: str = argument(
        "a preset (see `polyformer list preset`), a run, or a checkpoint (a directory, a GGUF file or a name "
        "on the hub); or 'pattern' or 'position', followed by a NAME",
        metavar="MODEL",
    )
    name: str | None = argument("expression of the pattern, or name of the position scheme", None)
    mesh: str | None = option(
        "predict memory and communication of training on this device mesh: data=N, shard=N, tensor=N, "
        "context=N and pipeline=N (with stages=N per process, or pipeline_schedule=gpipe), separated by "
        "commas; MODEL may then be the file of a recipe",
        metavar="MESH",
    )
    batch: PositiveInt | None = option(
        "with --mesh: batch size per process, in texts (default: 1, or the recipe's)"
    )
    accumulate: PositiveInt | None = option(
        "with --mesh: batches per step (microbatches of a pipeline) (default: 1, or the recipe's)"
    )
    precision: Literal["bf16", "no"] | None = option(
        "with --mesh: mixed precision (default: bf16, or the recipe's)"
    )
    length: PositiveInt | None = option(
        "tokens in the picture (default: 64, or for a pattern the first length at which it is "
        "sparse); with --mesh per text"
    )
    heads: int | None = option("heads in the picture; equal heads are drawn once (default: 4)")
    causal: bool = option("hide later tokens, as in a decoder", False)
    block: int | None = option("for a pattern: queries per block of the sparse layout (default: 16)")
    layer: int | None = option("for a pattern that differs by layer: layer, from 0 (default: 0)")
    paths: bool = option("for a pattern: the number of layers that connect two tokens, for all pairs", False)
    out: str | None = option(
        "draw the picture into this file, .png or .svg (default: print as text)",
        metavar="FILE",
        output="file",
    )
    changes: dict[str, Any] = model_settings()


def run(options: ShowOptions) -> None:
    """Print or draw the subject."""
    if options.subject in ("pattern", "position"):
        return show_picture(options)
    if options.name is not None:
        raise InputError(f"unexpected {quote(options.name)}: expected no argument after a model")
    if options.mesh is None:
        refuse(options, MESH, "requires --mesh, for example --mesh data=8,shard=8")
        refuse(options, PICTURE, "only for `show pattern` and `show position`, not for a model")
        return show_model(options.subject, preset_overrides(options.subject, options.changes))
    drawing = set(PICTURE) - {"length"}
    refuse(options, drawing, "only for `show pattern` and `show position`, not with --mesh")
    changes = preset_overrides(options.subject, options.changes)
    recipe = options.subject.endswith((".yaml", ".yml"))
    show_prediction(None if recipe else config_of(options.subject, changes), options)


def show_picture(options: ShowOptions) -> None:
    """Print or draw a pattern or a position scheme."""
    from polyformer.cli.plots.show_pictures import show_pattern, show_position

    what = f"`show {options.subject}`"
    for name in options.changes:
        raise InputError(f"--{name}: only for presets, not for {what}")
    refuse(options, ("mesh", *MESH), f"only for models, not for {what}")
    if options.subject == "pattern":
        return show_pattern(options.name, **set_options(options, PICTURE))
    own = {"block", "layer", "paths"}
    refuse(options, own, "only for `show pattern`, not for a position scheme")
    show_position(options.name, **set_options(options, set(PICTURE) - own))


def show_model(name: str, overrides: dict[str, Any]) -> None:
    """Print parameters, memory, costs and modules of a preset or of a saved model."""
    import torch

    from polyformer.cli.plots.model import image_cost, parameters, tree
    from polyformer.models.architectures import Transformer, VisionTransformer, build_model
    from polyformer.models.config import ModelConfig

    config = config_of(name, overrides)
    rounded = isinstance(config, ModelConfig) and config.weights is not None
    with torch.device("meta"):
        model = build_model(config)
        plain = build_model(replace(config, weights=None)) if rounded else model
    weights = 4 * parameters(plain)
    print(f"{name}: {parameters(plain):,} parameters, {format_bytes(weights)} in float32")
    if rounded:
        stored = sum(tensor.nbytes for tensor in model.state_dict().values())
        print(f"weights in {config.weights}: {format_bytes(stored)}; they cannot be trained\n")
    else:
        adam = format_bytes(4 * weights)
        print(f"training with Adam: {adam} (weights, gradients, two moments) plus activations\n")
    if isinstance(config, ModelConfig) and isinstance(
        plain, Transformer
    ):  # costs depend on the number of tokens
        print(text_costs(plain, config), end="\n\n")
    elif isinstance(plain, VisionTransformer):
        print(costs([image_cost(plain)]), end="\n\n")
    print(tree(model))


def text_costs(model: "Transformer", config: "ModelConfig") -> str:
    """Return the costs by length of a `model` on the meta device, with the reason for what is missing."""
    from polyformer.cli.plots.model import cost
    from polyformer.models.architectures import Transformer

    limit = longest_text(config)
    lengths = [length for length in LENGTHS if length <= limit] or [limit]
    notes = ""
    try:
        cost(model, lengths[0])
    except InputError:
        pass  # `costs_by_length` tries shorter texts and prints the reason
    except RuntimeError:  # an operation that reads numbers has none on the meta device
        model = Transformer(replace(config, weights=None))
        lengths = [length for length in lengths if length <= LONGEST_REAL_PASS] or lengths[:1]
        notes = "\nmeasured in real passes, because the model reads numbers on its way"
    if config.decoder is not None and not config.decoder.attention.mechanism.supports_kv_cache:
        notes += "\nno cache: generation computes the whole text again for each token"
    return costs_by_length(functools.partial(cost, model), lengths) + notes


def config_of(name: str, overrides: dict[str, Any]) -> "AnyConfig":
    """Return the configuration of a preset with `overrides`, or of a saved model or a checkpoint."""
    from polyformer.models import checkpoints
    from polyformer.models.presets import model_config

    if "/" not in name and not Path(name).exists():
        return model_config(name, overrides)
    for setting in overrides:
        raise InputError(f"--model.{setting}: only presets have settings, and {name} is a saved model")
    return checkpoints.config_of(name)


def longest_text(config: "ModelConfig") -> int:
    """Return the largest number of tokens per text: the learned positions, or the last of `LENGTHS`."""
    from polyformer.models.config import max_positions

    return max_positions(config) or LENGTHS[-1]


def costs_by_length(cost: Callable[[int], "Cost"], lengths: list[int]) -> str:
    """Return the costs as a table, up to the first length that the model refuses, with its reason.

    A model that refuses all lengths, as one for images of a fixed shape, gets a shorter one.
    """
    rows: list[Cost] = []
    reason = ""
    shorter = [length for length in SHORTER if length < lengths[0]]
    for length in [*lengths, *shorter]:
        if length < lengths[0] and rows:
            break
        if length > lengths[0] and reason:
            continue
        try:
            rows.append(cost(length))
        except InputError as error:
            reason = reason or f"\nnot for {length} tokens or more: {error}"
    return costs(rows) + reason


def costs(rows: "list[Cost]") -> str:
    """Return the costs as a table with one row per length."""
    lines = [f"{'tokens':>8}{'forward FLOPs':>16}{'activations':>14}{'cache':>12}"]
    for row in rows:
        cache = "" if row.cache is None else format_bytes(row.cache)
        lines.append(f"{row.length:>8}{row.flops:>16.3g}{format_bytes(row.activations):>14}{cache:>12}")
    return "\n".join(lines)


USUAL = 2048
"""Default tokens per text of a model without a limit."""


def show_prediction(config: "AnyConfig | None", options: Any) -> None:
    """Print the prediction for a model of `config`, or for the recipe that `options` name if it is None.

    The recipe's batches, precision and optimizer are the defaults of the options.
    """
    from rich.console import Console

    from polyformer.models.config import ModelConfig, max_positions
    from polyformer.training.distributed.predict import parse_mesh, predict
    from polyformer.training.distributed.predict_local import TrainingSetup

    name = options.subject
    recipe = read_recipe(name) if config is None else None
    config = recipe["model"] if recipe is not None else config
    if not isinstance(config, ModelConfig):
        raise InputError(f"{name}: predictions are available only for models of texts")
    limit = max_positions(config)
    length = options.length or (recipe or {}).get("length") or limit or USUAL
    if limit is not None and length > limit:
        raise InputError(f"--length: {name} supports at most {limit} tokens, got {length}")
    settings = {
        name: value for name, value in (recipe or {}).items() if name in ("half", "passes", "optimizer")
    }
    if options.precision is not None:
        settings["half"] = options.precision == "bf16"
    if options.accumulate is not None:
        settings["passes"] = options.accumulate
    batch = options.batch or max((recipe or {}).get("batch_tokens", 0) // length, 1)
    mesh = parse_mesh(options.mesh)
    settings.setdefault("passes", mesh.pipeline)
    setting = TrainingSetup(mesh=mesh, batch=batch, length=length, **settings)
    console = Console(width=100, highlight=False)
    for part in report(name, config, setting, predict(config, setting)):
        console.print(part)


def read_recipe(name: str) -> dict[str, Any]:
    """Return the values of a recipe's file that a prediction needs."""
    from polyformer.training.recipes.recipe import Recipe, find_recipe

    recipe = Recipe.from_dict(find_recipe(name))
    kind = recipe.optimizer.kind
    if kind == "sgd" and not getattr(recipe.optimizer, "momentum", 0):
        kind = "sgd without momentum"
    return {
        "model": recipe.model_config(),
        "length": getattr(recipe.task, "row_length", None) or getattr(recipe.task, "max_length", None),
        "batch_tokens": getattr(recipe.task, "batch_tokens", 0),
        "half": recipe.training.engine.precision != "no",
        "passes": recipe.training.accumulate,
        "optimizer": kind,
    }


def report(
    name: str, config: "ModelConfig", setting: "TrainingSetup", prediction: "Prediction"
) -> "list[str | Table]":
    """Return the settings as lines, and tables of memory and communication."""
    from rich.table import Table

    mesh = (
        " x ".join(f"{way} {number}" for way, number in setting.sizes.items() if number > 1) or "one process"
    )
    precision = "mixed precision (bf16, weights in float32)" if setting.half else "float32"
    lines = [
        f"{name} on {setting.world:,} GPUs: {mesh}; {precision}; {setting.optimizer}",
        f"one step: {setting.passes} x {setting.batch} texts of {setting.length:,} tokens for each of "
        f"{setting.sizes['data'] * setting.sizes['shard']:,} batches, {setting.tokens:,} tokens in total",
    ]
    if setting.sizes["pipeline"] > 1:
        lines.append(f"pipeline stage {prediction.stage + 1} needs the most memory")
    memory = Table(title="memory per process", title_justify="left")
    for heading in ("what", "activations kept", "activation checkpointing"):
        memory.add_column(heading, justify="left" if heading == "what" else "right")
    kept = prediction.memory
    for what in ("parameters", "gradients", "optimizer"):
        memory.add_row(what, *2 * [format_bytes(getattr(kept, what))])
    if kept.gathered:
        memory.add_row("gathered weights (shard)", *2 * [format_bytes(kept.gathered)])
    memory.add_row(
        "activations", format_bytes(kept.activations), format_bytes(kept.recomputed), end_section=True
    )
    memory.add_row("sum", format_bytes(kept.total(again=False)), format_bytes(kept.total(again=True)))
    traffic = Table(
        title="bytes sent per process and step (the same amount is received)", title_justify="left"
    )
    for heading in ("along", "what", "activations kept", "activation checkpointing"):
        traffic.add_column(heading, justify="right" if "a" in heading[:2] and heading != "along" else "left")
    for row, again in zip(prediction.exchanges, prediction.exchanges_again):
        traffic.add_row(row.dimension, row.what, format_bytes(row.sent), format_bytes(again.sent))
    return [*lines, memory, traffic] if prediction.exchanges else [*lines, memory]


def format_bytes(number: float) -> str:
    """Return a number of bytes with a unit; 1 MB is 10^6 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.4g} TB"
