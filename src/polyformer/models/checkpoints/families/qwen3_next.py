"""Qwen3-Next: gated delta networks, gated attention in every fourth layer, experts. Qwen Team 2025.

Files of linear layers have queries, keys, values and output gates in one matrix, interleaved by key heads,
and both gates of the state in another. Tensors of multi-token prediction (`mtp`) are kept and not computed.
"""

import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from polyformer.attention.mechanisms import GatedDeltaConfig, SoftmaxConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.checkpoints.config_mapping import (
    Option,
    Tree,
    choice,
    option,
    read_options,
    with_defaults,
    write_options,
)
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.families.qk_norms import NORMS, of_all_norms
from polyformer.models.checkpoints.families.window_layers import (
    FULL,
    check_kinds,
    in_turn,
    of_layers,
)
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Interleaved, Taps
from polyformer.models.checkpoints.rope_options import read_rope, write_rope
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import ExpertsConfig, GatedConfig

LINEAR = "linear_attention"
DELTA = (
    option("linear_conv_kernel_dim", 4, "short_convolution"),
    option("linear_num_key_heads", 16, "heads.key_heads"),
    option("linear_num_value_heads", 32, "heads.value_heads"),
    option("linear_key_head_dim", 128, "heads.key_size"),
    option("linear_value_head_dim", 128, "heads.value_size"),
    option("rms_norm_eps", 1e-6, "norm_eps"),
)
SPARSE = (
    option("num_experts", 512, "experts"),
    option("num_experts_per_tok", 10, "top_k"),
    choice("norm_topk_prob", True, {True: "chosen", False: "all"}, "gates"),
    option("moe_intermediate_size", 512, "expert.intermediate_size"),
    option("shared_expert_intermediate_size", 512, "shared_expert.intermediate_size"),
    option("router_aux_loss_coef", 0.001, "balance"),
)
PARTS: dict[str, tuple[dict[str, Any], tuple[Option, ...]]] = {
    "softmax": (SoftmaxConfig().to_dict(), (option("attention_dropout", 0.0, "dropout"),)),
    "gated_delta": (
        GatedDeltaConfig(
            heads=RecurrentHeadsConfig(key_heads=16, value_heads=32, key_size=128, value_size=128)
        ).to_dict(),
        DELTA,
    ),
    "gated": (GatedConfig().to_dict(), (option("intermediate_size", 5632, "intermediate_size"),)),
    "experts": (
        ExpertsConfig(expert=GatedConfig(), shared_expert=GatedConfig(), shared_expert_gate=True).to_dict(),
        SPARSE,
    ),
}
"""The mechanisms and feed-forwards of layers: a template, and its options."""

LAYER = "decoder.layers.{i}.attention"
FEEDFORWARD = "decoder.layers.{i}.feedforward"


def heads_of(config: ModelConfig) -> RecurrentHeadsConfig:
    """Return the heads of the linear layers of a model."""
    assert config.decoder is not None
    mechanisms = map(config.decoder.attention.mechanism.for_layer, range(config.decoder.num_hidden_layers))
    return next(part.heads for part in mechanisms if isinstance(part, GatedDeltaConfig) and part.heads)


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
class Qwen3Next(LlamaFamily):
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
        "layers.{i}.mlp.gate": f"{FEEDFORWARD}.router",
        "layers.{i}.mlp.experts.{e}.[gate|up|down]_proj": f"{FEEDFORWARD}.experts.{{e}}.[gate|up|down]",
        "layers.{i}.mlp.shared_expert.[gate|up|down]_proj": f"{FEEDFORWARD}.shared_expert.[gate|up|down]",
        "layers.{i}.mlp.shared_expert_gate": f"{FEEDFORWARD}.shared_expert_gate",
    }
    tasks: ClassVar = {
        **LlamaFamily.tasks,
        "ForCausalLM": dataclasses.replace(LlamaFamily.tasks["ForCausalLM"], unused_keys=("mtp.*",)),
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers, and a wrong number."""
        super().check(hub)
        check_kinds("layer_types", _kinds(hub), (FULL, LINEAR), "num_hidden_layers", hub)

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether the layer of a tensor has this kind of attention."""
        layer = re.search(r"layers\.(\d+)\.(self|linear)_attn", theirs)
        if layer is None or config.decoder is None:
            return True
        mechanism = config.decoder.attention.mechanism.for_layer(int(layer[1]))
        return (layer[2] == "linear") == (mechanism.kind == "gated_delta")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the mechanism and the feed-forward of every layer, and partly rotated heads."""
        decoder, every = tree["decoder"], hub["decoder_sparse_step"]
        sparse = [
            i not in (hub["mlp_only_layers"] or ()) and hub["num_experts"] > 0 and (i + 1) % every == 0
            for i in range(hub["num_hidden_layers"])
        ]
        mechanisms = [_part("softmax" if kind == FULL else "gated_delta", hub) for kind in _kinds(hub)]
        decoder["attention"] |= {"head_size": hub["head_dim"], "mechanism": in_turn("mechanisms", mechanisms)}
        feedforwards = [_part("experts" if chosen else "gated", hub) for chosen in sparse]
        decoder["feedforward"] = in_turn("feedforwards", feedforwards)
        rope = dict(hub["rope_scaling"] or hub["rope_parameters"] or {})
        fraction = rope.pop("partial_rotary_factor", hub["partial_rotary_factor"])
        decoder["position"] |= read_rope({**hub, "rope_scaling": None, "rope_parameters": rope})
        decoder["position"]["fraction"] = fraction

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of both kinds of attention and of feed-forwards that the model has."""
        decoder = tree["decoder"]
        count, position = decoder["num_hidden_layers"], decoder["position"]
        mechanisms = of_layers("mechanisms", decoder["attention"]["mechanism"], count)
        feedforwards = of_layers("feedforwards", decoder["feedforward"], count)
        rope = write_rope(position)["rope_parameters"]
        hub: Tree = {
            "head_dim": decoder["attention"]["head_size"],
            "layer_types": [LINEAR if part["kind"] == "gated_delta" else FULL for part in mechanisms],
            "mlp_only_layers": [i for i, part in enumerate(feedforwards) if part["kind"] != "experts"],
            "rope_parameters": {**rope, "partial_rotary_factor": position.get("fraction", 1.0)},
        }
        for part in (*mechanisms, *feedforwards):
            _, mapping = PARTS.get(part["kind"], ({}, ()))
            hub |= write_options(mapping, part)
        return hub


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from the list, or every `full_attention_interval`-th with softmax."""
    if hub["layer_types"] is not None:
        return hub["layer_types"]
    every = hub["full_attention_interval"]
    return [LINEAR if (layer + 1) % every else FULL for layer in range(hub["num_hidden_layers"])]


def _part(kind: str, hub: Tree) -> Tree:
    """Return a mechanism or a feed-forward with its options in a file."""
    template, mapping = PARTS[kind]
    tree = copy.deepcopy(template)
    read_options(mapping, hub, tree)
    return tree
