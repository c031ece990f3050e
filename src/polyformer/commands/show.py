"""Show a model, with its costs and parts, or a picture of a pattern or of a position scheme."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.commands.base import argument, option
from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.architecture import ModelConfig
    from polyformer.model import AnyConfig

EXAMPLES = """examples:
  polyformer show gpt2
  polyformer show runs/default-1
  polyformer show pattern "Window(8) | Global(2)" --length 64
  polyformer show pattern "PerHead([Window(8), Full])" --causal --out heads.svg
  polyformer show position alibi --length 64 --out alibi.png
  polyformer show position "{kind: rope, base: 500}"
"""

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Options:
    subject: str = argument(
        "a preset (see `polyformer list`), or the directory of a run or a model; or `pattern`, or `position`"
    )
    name: str | None = argument("the pattern, as an expression, or the kind of position scheme", None)
    length: int | None = option(
        "tokens in the picture (default 64, of a pattern more where it would be full)"
    )
    heads: int | None = option("heads in the picture (default 4); those that are alike are drawn once")
    causal: bool = option("without the future", False)
    block: int | None = option("of a pattern: queries in a row of its layout (default 16)")
    layer: int | None = option("of a pattern: the layer of a stack (default 0)")
    out: str | None = option("write a figure to this file, .png or .svg; otherwise it is drawn as text")


def run(options: Options) -> None:
    if options.subject in ("pattern", "position"):
        from polyformer.commands.pictures import show_pattern, show_position

        show = show_pattern if options.subject == "pattern" else show_position
        return show(options.name, **given(options))
    if options.name is not None:
        raise InputError(f"unexpected {quote(options.name)}: after a model nothing else is expected")
    for name in given(options):
        raise InputError(f"--{name}: belongs to `show pattern` and `show position`, not to a model")
    show_model(options.subject)


def given(options: Options) -> dict[str, Any]:
    """The options that are set, the subject and its name apart."""
    values = {field.name: getattr(options, field.name) for field in fields(options)[2:]}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def show_model(name: str) -> None:
    import torch

    from polyformer.architecture import ModelConfig
    from polyformer.model import build_model
    from polyformer.visual.tree import parameters, tree

    config = described(name)
    with torch.device("meta"):
        model = build_model(config)
    weights = 4 * parameters(model)
    print(f"{name}: {parameters(model):,} parameters, {size(weights)} in float32")
    print(f"training with Adam: {size(4 * weights)} (gradients, two moments) and the activations\n")
    if isinstance(config, ModelConfig):  # costs are by the token
        print(costs(model, [one for one in LENGTHS if one <= reach(config)] or [reach(config)]), end="\n\n")
    print(tree(model))


def described(name: str) -> "AnyConfig":
    """The configuration of a preset, or of the model in a directory."""
    from polyformer.model import read_config
    from polyformer.model.saving import CONFIG
    from polyformer.presets import model_config

    if not Path(name).is_dir():
        return model_config(name)
    if not (Path(name) / CONFIG).is_file():
        raise InputError(f"{name}: not a model directory (it has no {CONFIG})")
    return read_config(Path(name))


def reach(config: "ModelConfig") -> int:
    """The longest text: as many tokens as there are learned positions, or any number."""
    from polyformer.recipes.reader import longest

    return longest(config) or LENGTHS[-1]


def costs(model, lengths: list[int]) -> str:
    """A table: a row for each length."""
    from polyformer.visual.cost import cost

    lines = [f"{'tokens':>8}{'forward FLOPs':>16}{'activations':>14}{'cache':>12}"]
    for length in lengths:
        found = cost(model, length)
        cache = "" if found.cache is None else size(found.cache)
        lines.append(f"{length:>8}{found.flops:>16.3g}{size(found.activations):>14}{cache:>12}")
    return "\n".join(lines)


def size(number: float) -> str:
    """Bytes in the unit that suits them: 1 MB is 10^6 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.4g} TB"
