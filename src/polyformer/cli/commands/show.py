"""Show a model's parameters, costs and modules, or a picture of an attention pattern or a position scheme.

For a model: parameters, memory, FLOPs (a multiply-add counts as two) and cache by text length or for an
image, and the modules. With --mesh: predicted memory and communication of each process in distributed
training. For a pattern: the keys that each query attends to. For a position scheme: its effect on the scores
or the input.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import argument, model_settings, option, preset_overrides
from polyformer.cli.commands.show_prediction import check, is_recipe, show_prediction
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt
from polyformer.core.units import format_bytes

if TYPE_CHECKING:
    from polyformer.cli.plots.cost import Cost
    from polyformer.models.architectures import AnyConfig
    from polyformer.models.config import ModelConfig

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

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `polyformer show`."""

    subject: str = argument(
        "a preset (see `polyformer list preset`), or the directory of a run or a model; or 'pattern' or "
        "'position', followed by a NAME",
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
    check(options)
    if options.mesh is not None and options.subject not in ("pattern", "position"):
        if options.name is not None:
            raise InputError(f"unexpected {quote(options.name)}: expected no argument after a model")
        changes = preset_overrides(options.subject, options.changes)
        recipe = is_recipe(options.subject)
        return show_prediction(None if recipe else config_of(options.subject, changes), options)
    if options.subject in ("pattern", "position"):
        from polyformer.cli.commands.show_pictures import show_pattern, show_position

        for name in options.changes:
            raise InputError(f"--{name}: only for presets, not for `show {options.subject}`")
        show = show_pattern if options.subject == "pattern" else show_position
        return show(options.name, **set_options(options))
    if options.name is not None:
        raise InputError(f"unexpected {quote(options.name)}: expected no argument after a model")
    for name in set_options(options):
        raise InputError(f"--{name}: only for `show pattern` and `show position`, not for a model")
    show_model(options.subject, preset_overrides(options.subject, options.changes))


def set_options(options: ShowOptions) -> dict[str, Any]:
    """Return the options with other values than the defaults, without `subject`, `name` and `changes`."""
    values = {field.name: getattr(options, field.name) for field in fields(options)[2:-1]}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def show_model(name: str, overrides: dict[str, Any]) -> None:
    """Print parameters, memory, costs and modules of a preset or of the model in a directory."""
    import torch

    from polyformer.cli.plots.cost import cost, image_cost
    from polyformer.cli.plots.tree import parameters, tree
    from polyformer.models.architectures import Transformer, VisionTransformer, build_model
    from polyformer.models.config import ModelConfig

    config = config_of(name, overrides)
    rounded = isinstance(config, ModelConfig) and config.weights == "int8"
    with torch.device("meta"):
        model = build_model(config)
        plain = build_model(replace(config, weights=None)) if rounded else model
    weights = 4 * parameters(plain)
    print(f"{name}: {parameters(plain):,} parameters, {format_bytes(weights)} in float32")
    if rounded:
        stored = sum(tensor.nbytes for tensor in model.state_dict().values())
        print(f"weights in int8: {format_bytes(stored)}; int8 weights cannot be trained\n")
    else:
        adam = format_bytes(4 * weights)
        print(f"training with Adam: {adam} (weights, gradients, two moments) plus activations\n")
    if isinstance(config, ModelConfig) and isinstance(
        plain, Transformer
    ):  # costs depend on the number of tokens
        limit = longest_text(config)
        lengths = [length for length in LENGTHS if length <= limit] or [limit]
        print(costs([cost(plain, length) for length in lengths]), end="\n\n")
    elif isinstance(plain, VisionTransformer):
        print(costs([image_cost(plain)]), end="\n\n")
    print(tree(model))


def config_of(name: str, overrides: dict[str, Any]) -> "AnyConfig":
    """Return the configuration of a preset with `overrides`, or of the model in a directory."""
    from polyformer.models.architectures import read_config
    from polyformer.models.architectures.pretrained import CONFIG
    from polyformer.models.presets import model_config

    if not Path(name).is_dir():
        return model_config(name, overrides)
    if not (Path(name) / CONFIG).is_file():
        raise InputError(f"{name}: not a model directory (it has no {CONFIG})")
    return read_config(Path(name))


def longest_text(config: "ModelConfig") -> int:
    """Return the largest number of tokens per text: the learned positions, or the last of `LENGTHS`."""
    from polyformer.models.config import max_positions

    return max_positions(config) or LENGTHS[-1]


def costs(rows: "list[Cost]") -> str:
    """Return the costs as a table with one row per length."""
    lines = [f"{'tokens':>8}{'forward FLOPs':>16}{'activations':>14}{'cache':>12}"]
    for row in rows:
        cache = "" if row.cache is None else format_bytes(row.cache)
        lines.append(f"{row.length:>8}{row.flops:>16.3g}{format_bytes(row.activations):>14}{cache:>12}")
    return "\n".join(lines)
