"""`show MODEL --mesh ...`: predict memory and communication of each process in distributed training."""

from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError
from polyformer.core.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from polyformer.models.architectures import AnyConfig
    from polyformer.models.config import ModelConfig
    from polyformer.training.distributed.predict import Prediction, TrainingSetup

USUAL = 2048
"""Default tokens per text of a model without a limit."""


def is_recipe(name: str) -> bool:
    """Return whether `name` is the file of a recipe."""
    return name.endswith((".yaml", ".yml"))


def show_prediction(config: "AnyConfig | None", options: Any) -> None:
    """Print the prediction for a model of `config`, or for the recipe that `options` name if it is None.

    The recipe's batches, precision and optimizer are the defaults of the options.
    """
    from rich.console import Console

    from polyformer.models.config import ModelConfig, max_positions
    from polyformer.training.distributed.predict import TrainingSetup, parse_mesh, predict

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
    from polyformer.training.recipes.find import find_recipe
    from polyformer.training.recipes.recipe import Recipe

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


def check(options: Any) -> None:
    """Raise `InputError` for options of --mesh without it, and for options that --mesh does not support."""
    if options.mesh is None:
        for name in ("batch", "accumulate", "precision"):
            if getattr(options, name) is not None:
                raise InputError(f"--{name}: requires --mesh, for example --mesh data=8,shard=8")
        return
    for name in ("heads", "causal", "block", "layer", "out"):
        if getattr(options, name) not in (None, False):
            raise InputError(f"--{name}: only for `show pattern` and `show position`, not with --mesh")
