"""Qwen2: Llama with biases of queries, keys and values; later layers may have a window. Yang et al. 2024."""

from typing import ClassVar

from polyformer.core.errors import InputError, unknown
from polyformer.models.checkpoints.config_mapping import Tree, with_defaults
from polyformer.models.checkpoints.families.llama import ANSWERS, OPTIONS, OTHER_OPTIONS, LlamaFamily, tasks
from polyformer.models.checkpoints.families.window_layers import get_windows, set_windows
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.tables import Task
from polyformer.models.presets import model_config

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
    """A decoder with a window of `sliding_window` tokens from layer `max_window_layers` on, if
    `use_sliding_window` is set.

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
        """Raise `InputError` for unknown kinds of layers, a wrong number of them, and windows without a
        size.
        """
        super().check(hub)
        kinds, layers = _kinds(hub), hub.get("num_hidden_layers", 32)
        for kind in kinds:
            if kind not in KINDS:
                raise unknown("layer_types", kind, KINDS)
        if len(kinds) != layers:
            raise InputError(
                f"config.json: layer_types has {len(kinds)} layers, and num_hidden_layers {layers}"
            )
        if LOCAL in kinds and _window(hub) is None:
            raise InputError(f"config.json: sliding_window is None; expected 1 or more for {LOCAL}")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the window of every layer too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [_window(hub) if kind == LOCAL else None for kind in _kinds(hub)])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the kinds of all layers and their window too."""
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
    """Return the kind of each layer: from transformers' list, or else from the options."""
    if hub.get("layer_types") is not None:
        return hub["layer_types"]
    layers = hub.get("num_hidden_layers", 32)
    full = layers if _window(hub) is None else min(hub.get("max_window_layers", 28), layers)
    return [FULL] * full + [LOCAL] * (layers - full)
