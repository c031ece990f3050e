"""Qwen3-Next and Qwen3.5: gated delta networks, gated attention in every fourth layer, experts or not.

Qwen Team 2025 and 2026. Linear layers of Qwen3-Next have queries, keys, values and output gates in one
matrix, interleaved by key heads, and both gates of the state in another; Qwen3.5 has four plain matrices.
Tensors of multi-token prediction (`mtp`) are kept and not computed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from polyformer.attention.mechanisms import GatedDeltaConfig, SoftmaxConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.checkpoints.config_mapping import (
    Option,
    Tree,
    option,
    read_rope,
    with_defaults,
    write_rope,
)
from polyformer.models.checkpoints.families.common import LAST_TOKEN, SCORED
from polyformer.models.checkpoints.families.experts import (
    ALL_SPARSE,
    DENSE,
    EXPERT_KEYS,
    EXPERTS,
    SHARED_KEYS,
    ExpertsFamily,
)
from polyformer.models.checkpoints.families.layers import (
    FULL,
    check_kinds,
    of_layers,
)
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.families.qk_norms import NORMS, of_all_norms
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Interleaved, Part, Taps
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config

LINEAR = "linear_attention"
DELTA = (
    option("linear_conv_kernel_dim", 4, "short_convolution"),
    option("linear_num_key_heads", 16, "heads.key_heads"),
    option("linear_num_value_heads", 32, "heads.value_heads"),
    option("linear_key_head_dim", 128, "heads.key_size"),
    option("linear_value_head_dim", 128, "heads.value_size"),
    option("rms_norm_eps", 1e-6, "norm_eps"),
)
PARTS: dict[str, tuple[dict[str, Any], tuple[Option, ...]]] = {
    "softmax": (SoftmaxConfig().to_dict(), (option("attention_dropout", 0.0, "dropout"),)),
    "gated_delta": (
        GatedDeltaConfig(
            heads=RecurrentHeadsConfig(key_heads=16, value_heads=32, key_size=128, value_size=128)
        ).to_dict(),
        DELTA,
    ),
    "gated": DENSE,
    "experts": (EXPERTS.to_dict(), ALL_SPARSE),
}
"""The mechanisms and feed-forwards of layers: a template, and its options."""

LAYER = "decoder.layers.{i}.attention"


def heads_of(config: ModelConfig) -> RecurrentHeadsConfig:
    """Return the heads of the linear layers of a model."""
    assert config.decoder is not None
    mechanisms = map(config.decoder.attention.mechanism.for_layer, range(config.decoder.num_hidden_layers))
    return next(part.heads for part in mechanisms if isinstance(part, GatedDeltaConfig) and part.heads)


def concatenated(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return the rows of queries, keys and values of a linear layer, in one group."""
    return 1, projections(config)[1][:3]


def projections(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return the rows of queries, keys, values and z of a linear layer, by key heads."""
    heads = heads_of(config)
    keys, values = heads.key_heads * heads.key_size, heads.value_heads * heads.value_size
    return heads.key_heads, (keys, keys, values, values)


def state_gates(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return the rows of b and a, a number per value head, by key heads."""
    heads = heads_of(config)
    return heads.key_heads, (heads.value_heads, heads.value_heads)


def gated_queries(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return the rows of queries and their output gates, by heads."""
    assert config.decoder is not None
    attention = config.decoder.attention
    rows = attention.num_attention_heads * attention.width(config.hidden_size)
    return attention.num_attention_heads, (rows, rows)


@register
class Qwen3Next(ExpertsFamily):
    """A decoder with linear layers and a softmax layer in turn, and experts with a gated shared expert."""

    model_type = "qwen3_next"
    class_prefix = "Qwen3Next"
    paper = "Qwen Team 2025"
    template = (
        model_config("qwen3-0.6b")
        .override("decoder.norm", RMSNormConfig(eps=1e-6, centered=True))
        .override("decoder.attention.qk_norm", RMSNormConfig(eps=1e-6, centered=True))
        .override("decoder.attention.output_gate", True)
    )
    config_mapping = with_defaults(
        of_all_norms(OPTIONS),
        {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16}
        | {
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        *("intermediate_size", "hidden_act", "attention_dropout"),
    )
    # A bias would be of the softmax layers only.
    required: ClassVar = {"attention_bias": False, "hidden_act": "silu", "output_router_logits": False}
    other_options: ClassVar[dict[str, Any]] = {
        **LlamaFamily.other_options,
        **{option.theirs: option.default for _, mapping in PARTS.values() for option in mapping},
        **{"head_dim": 256, "partial_rotary_factor": 0.25, "layer_types": None, "full_attention_interval": 4},
        **{"mlp_only_layers": None, "decoder_sparse_step": 1},
    }
    parts = PARTS
    places: ClassVar = {".self_attn.": "softmax", ".linear_attn.": "gated_delta"}
    rope_of_images: ClassVar[tuple[str, ...]] = ()  # rotary options without effect on texts
    key_mapping: ClassVar = {
        **{key: ours for key, ours in LlamaFamily.key_mapping.items() if "self_attn" not in key},
        **NORMS,
        "layers.{i}.self_attn.q_proj": Interleaved((f"{LAYER}.query", f"{LAYER}.output_gate"), gated_queries),
        "layers.{i}.self_attn.[k|v|o]_proj": f"{LAYER}.[key|value|output]",
        "layers.{i}.linear_attn.in_proj_qkvz": Interleaved(
            tuple(f"{LAYER}.{name}" for name in ("query", "key", "value", "output_gate")), projections
        ),
        "layers.{i}.linear_attn.in_proj_ba": Interleaved((f"{LAYER}.gate",), state_gates),
        "layers.{i}.linear_attn.conv1d.weight": Taps((f"{LAYER}.mechanism.taps",)),
        "layers.{i}.linear_attn.[A_log|dt_bias|norm]": f"{LAYER}.mechanism.[log_rate|bias|norm]",
        "layers.{i}.linear_attn.out_proj": f"{LAYER}.output",
        **EXPERT_KEYS,
        **SHARED_KEYS,
    }
    tasks: ClassVar = {
        **LlamaFamily.tasks,
        "ForCausalLM": dataclasses.replace(LlamaFamily.tasks["ForCausalLM"], unused_keys=("mtp.*",)),
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers, and a wrong number."""
        super().check(hub)
        check_kinds("layer_types", _kinds(hub), (FULL, LINEAR), "num_hidden_layers", hub)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the mechanism and the feed-forward of every layer, and partly rotated heads."""
        decoder = tree["decoder"]
        self.set_mechanisms(tree, hub, ["softmax" if kind == FULL else "gated_delta" for kind in _kinds(hub)])
        decoder["attention"]["head_size"] = hub["head_dim"]
        decoder["feedforward"] = self.feedforward(hub)
        rope = dict(hub["rope_scaling"] or hub["rope_parameters"] or {})
        for name in self.rope_of_images:
            rope.pop(name, None)
        fraction = rope.pop("partial_rotary_factor", hub["partial_rotary_factor"])
        decoder["position"] |= read_rope({**hub, "rope_scaling": None, "rope_parameters": rope})
        decoder["position"]["fraction"] = fraction

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of both kinds of attention and of feed-forwards that the model has."""
        decoder = tree["decoder"]
        count, position = decoder["num_hidden_layers"], decoder["position"]
        mechanisms = self.mechanisms(tree)
        feedforwards = of_layers("feedforwards", decoder["feedforward"], count)
        rope = write_rope(position)["rope_parameters"]
        hub: Tree = {
            "head_dim": decoder["attention"]["head_size"],
            "layer_types": [LINEAR if part["kind"] == "gated_delta" else FULL for part in mechanisms],
            "rope_parameters": {**rope, "partial_rotary_factor": position.get("fraction", 1.0)},
        }
        return {**hub, **self.write_parts(feedforwards, mechanisms)}


@register
class Qwen35(Qwen3Next):
    """A decoder with linear layers and a softmax layer in turn; the text model of Qwen3.5.

    The rotary positions of images have three axes, which are equal in texts.
    """

    model_type = "qwen3_5_text"
    class_prefix = "Qwen3_5"
    paper = "Qwen Team 2026"
    config_mapping = with_defaults(
        Qwen3Next.config_mapping,
        {"vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4},
    )
    required: ClassVar = {"attention_bias": False, "hidden_act": "silu"}
    other_options: ClassVar = {
        **{
            name: value
            for name, value in Qwen3Next.other_options.items()
            if name
            not in (
                "mlp_only_layers",
                "decoder_sparse_step",
                *(option.theirs for option in ALL_SPARSE),
            )
        },
        "intermediate_size": 12288,
    }
    rope_of_images = ("mrope_section", "mrope_interleaved")
    key_mapping: ClassVar = {
        **{key: ours for key, ours in Qwen3Next.key_mapping.items() if "linear_attn.in_" not in key},
        "layers.{i}.linear_attn.in_proj_qkv": Interleaved(
            tuple(f"{LAYER}.{name}" for name in ("query", "key", "value")), concatenated
        ),
        "layers.{i}.linear_attn.in_proj_z": f"{LAYER}.output_gate",
        "layers.{i}.linear_attn.in_proj_b": Part((f"{LAYER}.gate",), 0, 2),
        "layers.{i}.linear_attn.in_proj_a": Part((f"{LAYER}.gate",), 1, 2),
    }
    tasks: ClassVar = {
        "ForCausalLM": Qwen3Next.tasks["ForCausalLM"],
        "TextModel": LAST_TOKEN,
        "TextForSequenceClassification": SCORED,
    }

    def sparse(self, hub: Tree) -> list[bool]:
        """Return that all layers have experts if the family has the option, else none."""
        return ["num_experts" in self.other_options] * hub["num_hidden_layers"]


@register
class Qwen35Moe(Qwen35):
    """The text model of Qwen3.5 with experts in all layers."""

    model_type = "qwen3_5_moe_text"
    class_prefix = "Qwen3_5Moe"
    template = Qwen35.template.override("feedforward", EXPERTS)
    config_mapping = with_defaults(
        Qwen35.config_mapping, {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}
    )
    required: ClassVar = Qwen3Next.required
    other_options: ClassVar = {
        **{name: value for name, value in Qwen35.other_options.items() if name != "intermediate_size"},
        **{option.theirs: option.default for option in ALL_SPARSE if option.theirs != "norm_topk_prob"},
        **{"num_experts": 256, "num_experts_per_tok": 8},
    }
    tasks: ClassVar = {name: Qwen35.tasks[name] for name in ("ForCausalLM", "TextModel")}


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from the list, or every `full_attention_interval`-th with softmax."""
    if hub["layer_types"] is not None:
        return hub["layer_types"]
    every = hub["full_attention_interval"]
    return [LINEAR if (layer + 1) % every else FULL for layer in range(hub["num_hidden_layers"])]
