"""Mistral: Llama with a window of tokens in its layers. Jiang et al. 2023."""

from typing import ClassVar

from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Tree, with_defaults
from polyformer.models.checkpoints.families.llama import ANSWERS, OPTIONS, OTHER_OPTIONS, LlamaFamily, tasks
from polyformer.models.checkpoints.families.window_layers import get_windows, set_windows
from polyformer.models.checkpoints.family import register
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config

DEFAULTS = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}


@register
class Mistral(LlamaFamily):
    """A decoder with a window of `sliding_window` tokens, the query's included, in all layers; null for
    none.
    """

    model_type = "mistral"
    class_prefix = "Mistral"
    paper = "Jiang et al. 2023"
    template = model_config("mistral-7b")
    config_mapping = with_defaults(OPTIONS, DEFAULTS)
    other_options = (*OTHER_OPTIONS, "sliding_window")
    tasks: ClassVar = tasks(ANSWERS)
    sizes = ("mistral-7b",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for layers of different kinds, which the class does not compute."""
        super().check(hub)
        if hub.get("layer_types") is not None:
            raise InputError(
                f"config.json: layer_types is {quote(hub['layer_types'])}; 'mistral' has layers of one kind, "
                f"with sliding_window or without"
            )

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model fits; without windows only if it was loaded as a Mistral."""
        return super().fits(config) and (
            config.origin is not None or any(get_windows(config.to_dict()) or ())
        )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the window too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [hub.get("sliding_window", 4096)])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the window of the first layer."""
        windows = get_windows(tree)
        return {**super().write_other_options(tree), "sliding_window": windows[0] if windows else None}
