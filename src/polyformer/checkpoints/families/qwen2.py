"""Qwen2: Llama with biases at queries, keys and values; later layers may see a window. Yang et al. 2024."""

from typing import ClassVar

from polyformer.checkpoints.config_mapping import Tree, with_defaults
from polyformer.checkpoints.families.llama import ANSWERS, OPTIONS, OTHER_OPTIONS, LlamaFamily, tasks
from polyformer.checkpoints.families.window_layers import get_windows, set_windows
from polyformer.checkpoints.family import register
from polyformer.checkpoints.tables import Task
from polyformer.core.errors import InputError, unknown
from polyformer.presets import model_config

FULL, LOCAL = KINDS = "full_attention", "sliding_attention"
DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
}


@register
class Qwen2(LlamaFamily):
    """Layers from `max_window_layers` on see `sliding_window` tokens where `use_sliding_window` says so.

    Newer files list the kinds of all layers.
    """

    model_type = "qwen2"
    class_prefix = "Qwen2"
    paper = "Yang et al. 2024"
    template = model_config("qwen2-7b")
    config_mapping = with_defaults(OPTIONS, DEFAULTS)
    other_options = (
        *OTHER_OPTIONS,
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
    )
    tasks: ClassVar = tasks(Task(ANSWERS.head, ANSWERS.key_mapping, base="transformer"))
    sizes = ("qwen2-0.5b", "qwen2-7b")

    def check(self, hub: Tree) -> None:
        """Refuses other kinds of layers, another number of them, and layers with a window of no size."""
        super().check(hub)
        kinds, layers = _kinds(hub), hub.get("num_hidden_layers", 32)
        for kind in kinds:
            if kind not in KINDS:
                raise unknown("layer_types", kind, KINDS)
        if len(kinds) != layers:
            raise InputError(
                f"config.json: layer_types has {len(kinds)} layers, and num_hidden_layers {layers}"
            )
        window = _window(hub)
        if LOCAL in kinds and (window is None or window < 2):
            raise InputError(f"config.json: sliding_window is {window}; expected 2 or more for {LOCAL}")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """The window of every layer too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [_window(hub) if kind == LOCAL else None for kind in _kinds(hub)])

    def write_other_options(self, tree: Tree) -> Tree:
        """The kinds of all layers and their window too."""
        windows = get_windows(tree) or []
        kinds = [FULL if window is None else LOCAL for window in windows]
        return {
            **super().write_other_options(tree),
            "layer_types": kinds,
            "use_sliding_window": LOCAL in kinds,
            "sliding_window": next(filter(None, windows), None),
            "max_window_layers": kinds.index(LOCAL) if LOCAL in kinds else len(kinds),
        }


def _window(hub: Tree) -> int | None:
    return hub.get("sliding_window", 4096) if hub.get("use_sliding_window", False) else None


def _kinds(hub: Tree) -> list[str]:
    """The kind of each layer: the list that transformers writes out, or else what it makes of the options."""
    if hub.get("layer_types") is not None:
        return hub["layer_types"]
    layers = hub.get("num_hidden_layers", 32)
    full = layers if _window(hub) is None else min(hub.get("max_window_layers", 28), layers)
    return [FULL] * full + [LOCAL] * (layers - full)
