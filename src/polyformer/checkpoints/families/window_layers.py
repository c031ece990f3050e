"""Layers of full and of windowed attention in turn, as families list them and as one pattern of ours."""

from typing import Any

from polyformer.attention import SoftmaxConfig
from polyformer.checkpoints.config_mapping import Tree, get_path
from polyformer.checkpoints.families.gpt_common import MECHANISM
from polyformer.patterns import PerLayer, Window
from polyformer.patterns.implied import Full


def set_windows(tree: Tree, windows: list[int | None]) -> None:
    """Sets a decoder's pattern: each layer's window in tokens, the query's own among them, or None."""
    period = tuple(Full() if tokens is None else Window(tokens - 1, 0) for tokens in _period(windows))
    pattern = period[0] if len(period) == 1 else PerLayer(period)
    config = SoftmaxConfig(pattern=None if period == (Full(),) else pattern)
    tree["decoder"]["attention"]["mechanism"]["pattern"] = config.to_dict()["pattern"]


def get_windows(tree: Tree) -> list[int | None] | None:
    """The window of each layer of a decoder in tokens; None where it has no softmax attention."""
    mechanism: Any = get_path(tree, MECHANISM) or {}
    if mechanism.get("kind") != "softmax":
        return None
    config = SoftmaxConfig.from_dict(mechanism)
    patterns = [config.at(layer).pattern for layer in range(tree["decoder"]["num_hidden_layers"])]
    return [pattern.before + 1 if isinstance(pattern, Window) else None for pattern in patterns]


def _period(windows: list[int | None]) -> list[int | None]:
    """The shortest beginning of a list whose repetition gives all of it."""
    lengths = range(1, len(windows) + 1)
    period = next(n for n in lengths if all(window == windows[i % n] for i, window in enumerate(windows)))
    return windows[:period]
