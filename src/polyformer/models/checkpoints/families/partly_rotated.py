"""Decoders with layers that are not rotated, and Cohere.

Cohere 2024; LG AI Research 2025 (EXAONE 4); Bakouch et al. 2025 (SmolLM3).
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.checkpoints.config_mapping import (
    Tree,
    flag,
    get_path,
    option,
    with_defaults,
)
from polyformer.models.checkpoints.families.decoders import BIASED_NORMS, LAYER
from polyformer.models.checkpoints.families.layers import FULL, LOCAL, period
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily, without
from polyformer.models.checkpoints.families.qk_norms import Olmo2, of_all_norms
from polyformer.models.checkpoints.family import register
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config

COHERE = (
    model_config("llama-2-7b")
    .override("decoder.norm", LayerNormConfig(bias=False))
    .override("block", "parallel")
    .override("decoder.position.layout", "pairs")
)


class PartlyRotated(LlamaFamily):
    """The base class of decoders in which only layers with a window are rotated."""

    windows = "layers"
    full_every = 4

    def rotated(self, hub: Tree) -> list[bool]:
        """Return whether each layer is rotated."""
        return [kind == LOCAL for kind in self.kinds(hub)]

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the layers without rotation too."""
        super().read_other_options(tree, hub)
        layers = period(self.rotated(hub))
        tree["decoder"]["position"]["rotated"] = [] if layers == [True] else layers


@register
class Cohere2(PartlyRotated):
    """A decoder of parallel blocks with layer norms without biases; full layers are not rotated."""

    model_type = "cohere2"
    class_prefix = "Cohere2"
    paper = "Cohere 2024"
    template = COHERE.override("mechanism", SoftmaxConfig(pattern=Window(4095, 0)))
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40}
            | {"num_attention_heads": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True}
            | {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 255001},
            "rms_norm_eps",
        ),
        *BIASED_NORMS,
        flag("attention_bias", "decoder.attention.bias"),
    )
    required: ClassVar = {"use_qk_norm": False}
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
    }
    ignored_options = ("use_cache", "_sliding_window_pattern")
    key_mapping: ClassVar = {
        **without(LlamaFamily.key_mapping, "layernorm"),
        "layers.{i}.input_layernorm": f"{LAYER}.block.norms.0",
    }
    tasks: ClassVar = {
        "ForCausalLM": dataclasses.replace(
            LlamaFamily.tasks["ForCausalLM"], config_mapping=(option("logit_scale", 0.0625, "logit_scale"),)
        ),
        "Model": LlamaFamily.tasks["Model"],
    }


@register
class Cohere(Cohere2):
    """A Cohere2 without windows, in which all layers are rotated: Command R."""

    model_type = "cohere"
    class_prefix = "Cohere"
    template = COHERE
    windows = ""
    other_options: ClassVar = {**LlamaFamily.other_options, "rope_theta": 500_000.0}

    def rotated(self, hub: Tree) -> list[bool]:
        """Return that all layers are rotated."""
        return [True]


@register
class Exaone4(PartlyRotated):
    """A decoder with norms after its sub-layers and of each head's queries and keys; full layers next to
    layers with windows are not rotated.
    """

    model_type = "exaone4"
    class_prefix = "Exaone4"
    paper = "LG AI Research 2025"
    template = model_config("olmo-2-1b").override("decoder.attention.qk_norm_of", "head")
    config_mapping = with_defaults(
        of_all_norms(OPTIONS),
        {"vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32}
        | {"rms_norm_eps": 1e-5, "bos_token_id": 0},
    )
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
    }
    key_mapping: ClassVar = Olmo2.key_mapping
    tasks: ClassVar = LlamaFamily.tasks

    def kinds(self, hub: Tree) -> list[str]:
        """Return the kind of each layer; all are full without a window."""
        if hub["sliding_window"] is None and hub["layer_types"] is None:
            return [FULL] * hub["num_hidden_layers"]
        return super().kinds(hub)

    def rotated(self, hub: Tree) -> list[bool]:
        """Return whether each layer is rotated: all are if the model has no window."""
        return [hub["sliding_window"] is None or kind == LOCAL for kind in self.kinds(hub)]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return no window if all layers are rotated."""
        hub = super().write_other_options(tree)
        full = LOCAL not in hub["layer_types"] and not get_path(tree, "decoder.position.rotated")
        return {**hub, "sliding_window": None} if full else hub


@register
class SmolLM3(PartlyRotated):
    """A decoder that rotates three of four layers; the others have windows with `use_sliding_window`."""

    model_type = "smollm3"
    class_prefix = "SmolLM3"
    paper = "Bakouch et al. 2025"
    template = model_config("smollm2-1.7b").override("decoder.position.rotated", (True, True, True, False))
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
            | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "pad_token_id": 128004}
            | {"bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True},
        ),
        flag("attention_bias", "decoder.attention.bias"),
        flag("mlp_bias", "decoder.feedforward.bias"),
    )
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{
            "rope_theta": 2_000_000.0,
            "sliding_window": None,
            "layer_types": None,
            "use_sliding_window": False,
        },
        **{"no_rope_layers": None, "no_rope_layer_interval": 4},
    }
    tasks: ClassVar = LlamaFamily.tasks

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model fits; with all layers rotated only if it was loaded as a SmolLM3."""
        # Otherwise it is a Llama, which more libraries read.
        position = get_path(config.to_dict(), "decoder.position") or {}
        return super().fits(config) and (config.origin is not None or bool(position.get("rotated")))

    def rotated(self, hub: Tree) -> list[bool]:
        every, layers = hub["no_rope_layer_interval"], range(hub["num_hidden_layers"])
        return [bool(flag) for flag in hub["no_rope_layers"] or [(i + 1) % every for i in layers]]

    def kinds(self, hub: Tree) -> list[str]:
        """Return the kind of each layer: from transformers' list, or else from the options."""
        if hub["layer_types"] is not None:
            return hub["layer_types"]
        windows = hub["use_sliding_window"] and hub["sliding_window"] is not None
        return [LOCAL if windows and not rotated else FULL for rotated in self.rotated(hub)]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the layers that are rotated too."""
        hub, layers = super().write_other_options(tree), tree["decoder"]["num_hidden_layers"]
        rotated = get_path(tree, "decoder.position.rotated") or [True]
        flags = [int(rotated[i % len(rotated)]) for i in range(layers)]
        return {**hub, "no_rope_layers": flags, "use_sliding_window": LOCAL in hub["layer_types"]}
