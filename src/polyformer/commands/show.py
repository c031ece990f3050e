"""Show a model: its parameters, what it costs at each length, and the tree of its parts."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.commands.base import argument

if TYPE_CHECKING:
    from polyformer.model import ModelConfig

EXAMPLES = """examples:
  polyformer show gpt2
  polyformer show runs/default-1
"""

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = argument("a preset (see `polyformer list`), or the directory of a run or a model")


def run(options: Options) -> None:
    import torch

    from polyformer.model import Transformer
    from polyformer.visual.tree import parameters, tree

    config = described(options.model)
    with torch.device("meta"):
        model = Transformer(config)
    weights = 4 * parameters(model)
    print(f"{options.model}: {parameters(model):,} parameters, {size(weights)} in float32")
    print(f"training with Adam: {size(4 * weights)} (gradients, two moments) and the activations\n")
    print(costs(model, [one for one in LENGTHS if one <= reach(config)] or [reach(config)]), end="\n\n")
    print(tree(model))


def described(name: str) -> "ModelConfig":
    """The configuration of a preset, or of the model in a directory."""
    from polyformer.core.errors import InputError
    from polyformer.core.files import read_json
    from polyformer.model import CONFIG, ModelConfig
    from polyformer.presets import model_config

    if not Path(name).is_dir():
        return model_config(name)
    if not (Path(name) / CONFIG).is_file():
        raise InputError(f"{name}: not a model directory (it has no {CONFIG})")
    return ModelConfig.from_dict(read_json(Path(name) / CONFIG))


def reach(config: "ModelConfig") -> int:
    """The longest text: as many tokens as there are learned positions, or any number."""
    from polyformer.position import LearnedConfig, LearnedPerLayerConfig

    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    learned = any(isinstance(stack.position, LearnedConfig | LearnedPerLayerConfig) for stack in stacks)
    return config.max_position_embeddings if learned else LENGTHS[-1]


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
