"""Bamba: Mamba-2 and softmax layers, each with a feed-forward. IBM Research 2024."""

from typing import Any, ClassVar

from polyformer.models.checkpoints.config_mapping import Tree, flag, option, with_defaults
from polyformer.models.checkpoints.families.experts import ExpertsFamily
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.families.mamba2 import (
    INFINITY,
    check_inner_width,
    mixer_keys,
    step_limits,
    write_limits,
)
from polyformer.models.checkpoints.family import register
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import HeadConfig

SOFTMAX, MIXER = (
    config.decoder.attention.mechanism
    for config in (model_config("llama-2-7b"), model_config("mamba-codestral-7b"))
    if config.decoder is not None
)
MAMBA = (
    option("mamba_d_conv", 4, "short_convolution"),
    option("mamba_conv_bias", True, "convolution_bias"),
    option("mamba_n_groups", 1, "heads.key_heads"),
    option("mamba_d_state", 256, "heads.key_size"),
    option("mamba_d_head", "auto", "heads.value_size"),
    option("mamba_n_heads", 128, "heads.value_heads"),
    option("rms_norm_eps", 1e-5, "norm_eps"),
)


@register
class Bamba(ExpertsFamily):
    """A decoder of Mamba-2 layers, with softmax in the layers that `attn_layer_indices` lists."""

    model_type = "bamba"
    class_prefix = "Bamba"
    paper = "IBM Research 2024"
    template = model_config("llama-2-7b").override("mechanism", MIXER)
    parts: ClassVar = {
        "softmax": (SOFTMAX.to_dict(), (option("attention_dropout", 0.0, "dropout"),)),
        "ssd": (MIXER.to_dict(), MAMBA),
    }
    places: ClassVar = {".self_attn.": "softmax", ".mamba.": "ssd"}
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
            | {"max_position_embeddings": 262144, "pad_token_id": 0},
            *("attention_dropout", "hidden_act"),
        ),
        flag("mlp_bias", "decoder.feedforward.bias"),
    )
    # A bias would be of one kind of layers only.
    required: ClassVar = {
        **{"attention_bias": False, "mamba_proj_bias": False, "hidden_act": "silu"},
        "z_loss_coefficient": 0.0,
    }
    other_options: ClassVar[dict[str, Any]] = {
        **LlamaFamily.other_options,
        **{option.theirs: option.default for option in MAMBA},
        **{"attention_dropout": 0.0, "partial_rotary_factor": 0.5, "attn_layer_indices": None},
        **{"mamba_expand": 2, "time_step_limit": [0.0, INFINITY]},
    }
    ignored_options = (
        *("use_cache", "num_logits_to_keep", "mamba_chunk_size"),
        *("layers_block_type", "layer_types"),
    )
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "layers.{i}.self_attn.[q|k|v|o]_proj": "decoder.layers.{i}.attention.[query|key|value|output]",
        **mixer_keys("layers.{i}.mamba"),
        "layers.{i}.feed_forward.[gate|up|down]_proj": "decoder.layers.{i}.feedforward.[gate|up|down]",
        "layers.{i}.[input|pre_ff]_layernorm": "decoder.layers.{i}.block.norms.[0|1]",
        "final_layernorm": "decoder.final_norm",
    }
    tasks: ClassVar = {name: LlamaFamily.tasks[name] for name in ("ForCausalLM", "Model")}

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family, with the width of heads that files leave out."""
        if hub.get("mamba_d_head", "auto") == "auto":
            inner = hub.get("mamba_expand", 2) * hub.get("hidden_size", 4096)
            hub = {**hub, "mamba_d_head": inner // hub.get("mamba_n_heads", 128)}
        return super().config(hub, task, head)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for heads that do not cover the inner width."""
        super().check(hub)
        check_inner_width(hub, "mamba_expand", "mamba_n_heads", "mamba_d_head")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the mechanism of every layer, and partly rotated heads."""
        LlamaFamily.read_other_options(self, tree, hub)
        chosen = hub["attn_layer_indices"] or ()
        kinds = ["softmax" if i in chosen else "ssd" for i in range(hub["num_hidden_layers"])]
        self.set_mechanisms(tree, hub, kinds, ssd=step_limits(hub))

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the layers with softmax, and the options of both kinds of layers."""
        mechanisms = self.mechanisms(tree)
        mixer = next((part for part in mechanisms if part["kind"] == "ssd"), {})
        heads = mixer.get("heads") or {}
        inner = (heads.get("value_heads") or 0) * (heads.get("value_size") or 0)
        return {
            **LlamaFamily.write_other_options(self, tree),
            **self.write_parts((), mechanisms),
            **write_limits(mixer),
            "attn_layer_indices": [i for i, part in enumerate(mechanisms) if part["kind"] == "softmax"],
            "mamba_expand": inner // tree["hidden_size"],
        }
