"""Decoders with experts: Mixtral, Granite-MoE, Qwen2-MoE and Qwen3-MoE, and the base of all with experts in
some layers.

Jiang et al. 2024; Shen et al. 2024; Yang et al. 2024; Yang et al. 2025.
"""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.models.checkpoints.config_mapping import (
    Option,
    Tree,
    activation,
    choice,
    flag,
    option,
    read_options,
    with_defaults,
    write_options,
)
from polyformer.models.checkpoints.families.decoders import Granite, input_biases
from polyformer.models.checkpoints.families.layers import FULL, LOCAL, in_turn, of_layers
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily, Mistral, without
from polyformer.models.checkpoints.families.qk_norms import NORMS, of_all_norms
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Converter
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import ExpertsConfig, GatedConfig
from polyformer.nn.heads import HeadConfig

FEEDFORWARD = "decoder.layers.{i}.feedforward"
SPARSE = (
    option("num_experts", 512, "experts"),
    option("num_experts_per_tok", 10, "top_k"),
    choice("norm_topk_prob", True, {True: "chosen", False: "all"}, "gates"),
    option("moe_intermediate_size", 512, "expert.intermediate_size"),
    option("router_aux_loss_coef", 0.001, "balance"),
)
ALL_SPARSE = (*SPARSE, option("shared_expert_intermediate_size", 512, "shared_expert.intermediate_size"))
GATED = GatedConfig(intermediate_size=512)
EXPERTS = ExpertsConfig(experts=256, top_k=8, expert=GATED, shared_expert=GATED, shared_expert_gate=True)
Parts = Mapping[str, tuple[Tree, tuple[Option, ...]]]
"""For each kind of mechanism or feed-forward a template, and the options that change it."""

DENSE = (GatedConfig().to_dict(), (option("intermediate_size", 5632, "intermediate_size"),))
EXPERT_KEYS = {
    "layers.{i}.mlp.gate": f"{FEEDFORWARD}.router",
    "layers.{i}.mlp.experts.{e}.[gate|up|down]_proj": f"{FEEDFORWARD}.experts.{{e}}.[gate|up|down]",
}
SHARED_KEYS = {
    "layers.{i}.mlp.shared_expert.[gate|up|down]_proj": f"{FEEDFORWARD}.shared_expert.[gate|up|down]",
    "layers.{i}.mlp.shared_expert_gate": f"{FEEDFORWARD}.shared_expert_gate",
}

LOCAL_EXPERTS = (
    option("intermediate_size", 11008, "decoder.feedforward.expert.intermediate_size"),
    activation("hidden_act", "silu", "decoder.feedforward.expert.activation"),
    option("num_local_experts", 8, "decoder.feedforward.experts"),
    option("num_experts_per_tok", 2, "decoder.feedforward.top_k"),
    option("router_aux_loss_coef", 0.001, "decoder.feedforward.balance"),
)
"""The options of experts in all layers."""


class ExpertsFamily(LlamaFamily):
    """The base class of decoders with layers of several mechanisms, or with experts in some layers.

    parts: what differs by layer, by its kind. places: parts of the names of tensors, with the kind of the
    mechanism with these tensors in its layers.
    """

    parts: ClassVar[Parts]
    places: ClassVar[Mapping[str, str]] = {}

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether the layer of a tensor has this kind of mechanism."""
        kinds = {kind for place, kind in self.places.items() if place in theirs}
        layer = re.search(r"layers\.(\d+)\.", theirs)
        if not kinds or layer is None or config.decoder is None:
            return True
        return config.decoder.attention.mechanism.for_layer(int(layer[1])).kind in kinds

    def set_mechanisms(self, tree: Tree, hub: Tree, kinds: Sequence[str], **more: Tree) -> None:
        """Set the mechanism of every layer by its kind. more: options of a kind beyond those in `parts`."""
        own = {kind: {**self.part(kind, hub), **more.get(kind, {})} for kind in dict.fromkeys(kinds)}
        tree["decoder"]["attention"]["mechanism"] = in_turn("mechanisms", [own[kind] for kind in kinds])

    def mechanisms(self, tree: Tree) -> list[Tree]:
        """Return the mechanism of every layer of ours."""
        decoder = tree["decoder"]
        return of_layers("mechanisms", decoder["attention"]["mechanism"], decoder["num_hidden_layers"])

    def sparse(self, hub: Tree) -> list[bool]:
        """Return whether each layer has experts."""
        dense, every = hub["mlp_only_layers"] or (), hub["decoder_sparse_step"]
        return [
            i not in dense and hub["num_experts"] > 0 and (i + 1) % every == 0
            for i in range(hub["num_hidden_layers"])
        ]

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the feed-forward of every layer too."""
        super().read_other_options(tree, hub)
        tree["decoder"]["feedforward"] = self.feedforward(hub)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the layers with experts, and the options of all feed-forwards too."""
        feedforward, count = tree["decoder"]["feedforward"], tree["decoder"]["num_hidden_layers"]
        parts = of_layers("feedforwards", feedforward, count)
        return {**super().write_other_options(tree), **self.write_parts(parts)}

    def feedforward(self, hub: Tree) -> Tree:
        """Return the feed-forwards of the layers of a file."""
        return in_turn(
            "feedforwards", [self.part("experts" if sparse else "gated", hub) for sparse in self.sparse(hub)]
        )

    def part(self, kind: str, hub: Tree) -> Tree:
        """Return a mechanism or a feed-forward with the family's options in a file."""
        template, mapping = self.parts[kind]
        tree = copy.deepcopy(template)
        read_options(tuple(option for option in mapping if option.theirs in self.other_options), hub, tree)
        return tree

    def write_parts(self, feedforwards: Sequence[Tree], others: Sequence[Tree] = ()) -> Tree:
        """Return the options of the feed-forwards of all layers, and of `others`."""
        dense = [i for i, part in enumerate(feedforwards) if part["kind"] != "experts"]
        hub: Tree = {"mlp_only_layers": dense}
        for part in (*others, *feedforwards):
            _, mapping = self.parts.get(part["kind"], ({}, ()))
            hub |= write_options(mapping, part)
        return {name: value for name, value in hub.items() if name in self.other_options}


@register
class Mixtral(LlamaFamily):
    """A decoder with experts in all layers, and a window in all layers or none."""

    model_type = "mixtral"
    class_prefix = "Mixtral"
    paper = "Jiang et al. 2024"
    template = model_config("llama-2-7b").override("feedforward", ExpertsConfig(expert=GatedConfig()))
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            *("intermediate_size", "hidden_act"),
        ),
        *with_defaults(LOCAL_EXPERTS, {"intermediate_size": 14336}),
        option("router_jitter_noise", 0.0, "decoder.feedforward.jitter"),
    )
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    required: ClassVar = {"output_router_logits": False}
    windows = "all"
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"rope_theta": 1_000_000.0, "sliding_window": None},
    }
    key_mapping: ClassVar = {
        **without(LlamaFamily.key_mapping, ".mlp."),
        "layers.{i}.block_sparse_moe.gate": f"{FEEDFORWARD}.router",
        "layers.{i}.block_sparse_moe.experts.{e}.[w1|w2|w3]": f"{FEEDFORWARD}.experts.{{e}}.[gate|down|up]",
    }
    tasks = Mistral.tasks


@dataclasses.dataclass(frozen=True)
class ExpertRows(Converter):
    """Layers of all X experts in one tensor [X, n F, E], with the rows of n layers one after the other."""

    count: int = 1  # n

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Return the weights [F, E] of each layer of each expert."""
        return [part for expert in theirs for part in expert.chunk(self.count)]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the tensor of all experts."""
        return torch.cat(list(ours)).unflatten(0, (len(ours) // self.count, -1))


@register
class GraniteMoe(Granite):
    """A Granite with experts in all layers; all experts of a layer are one tensor."""

    model_type = "granitemoe"
    class_prefix = "GraniteMoe"
    paper = "Shen et al. 2024"
    template = Granite.template.override("feedforward", ExpertsConfig(expert=GatedConfig()))
    config_mapping = (
        *with_defaults(Granite.config_mapping, {}, "intermediate_size", "hidden_act", "mlp_bias"),
        *LOCAL_EXPERTS,
    )
    required: ClassVar = {"output_router_logits": False}
    key_mapping: ClassVar = {
        **without(LlamaFamily.key_mapping, ".mlp."),
        "layers.{i}.block_sparse_moe.router.layer": f"{FEEDFORWARD}.router",
        "layers.{i}.block_sparse_moe.input_linear.weight": ExpertRows(
            tuple(f"{FEEDFORWARD}.experts.{{e}}.{name}.weight" for name in ("gate", "up")), 2
        ),
        "layers.{i}.block_sparse_moe.output_linear.weight": ExpertRows(
            (f"{FEEDFORWARD}.experts.{{e}}.down.weight",)
        ),
    }


@register
class Qwen2Moe(ExpertsFamily):
    """A decoder with experts and a gated shared expert, and windows in every second of the first layers."""

    model_type = "qwen2_moe"
    class_prefix = "Qwen2Moe"
    paper = "Yang et al. 2024"
    template = model_config("qwen2-7b")
    parts: ClassVar = {"gated": DENSE, "experts": (EXPERTS.to_dict(), ALL_SPARSE)}
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
            | {"num_key_value_heads": 16, "max_position_embeddings": 32768}
            | {"bos_token_id": None, "eos_token_id": None},
            *("intermediate_size", "hidden_act"),
        ),
        input_biases("qkv_bias", True),
    )
    required: ClassVar = {"output_router_logits": False, "hidden_act": "silu"}
    windows = "layers"
    window_flag = "use_sliding_window"
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "layer_types": None},
        **{"mlp_only_layers": None, "decoder_sparse_step": 1, "num_experts": 60, "num_experts_per_tok": 4},
        **{"norm_topk_prob": False, "moe_intermediate_size": 1408, "intermediate_size": 5632},
        **{"shared_expert_intermediate_size": 5632, "router_aux_loss_coef": 0.001},
    }
    key_mapping: ClassVar = {**LlamaFamily.key_mapping, **EXPERT_KEYS, **SHARED_KEYS}
    tasks = Mistral.tasks

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family; a window of 0 in files means none."""
        return super().config({**hub, "sliding_window": hub.get("sliding_window") or None}, task, head)

    def kinds(self, hub: Tree) -> list[str]:
        """Return the kind of each layer: from transformers' list, or else from the options."""
        if hub["layer_types"] is not None:
            return hub["layer_types"]
        last = hub["max_window_layers"] if self.window(hub) else 0
        return [LOCAL if (i + 1) % 2 and i < last else FULL for i in range(hub["num_hidden_layers"])]


@register
class Qwen3Moe(ExpertsFamily):
    """A decoder with experts and norms of queries and keys, and a window in all layers or none."""

    model_type = "qwen3_moe"
    class_prefix = "Qwen3Moe"
    paper = "Yang et al. 2025"
    template = model_config("qwen3-0.6b")
    parts: ClassVar = {
        "gated": DENSE,
        "experts": (ExpertsConfig(experts=128, top_k=8, expert=GATED).to_dict(), SPARSE),
    }
    config_mapping = (
        *with_defaults(
            of_all_norms(OPTIONS),
            {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_key_value_heads": 4}
            | {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None},
            *("intermediate_size", "hidden_act"),
        ),
        flag("attention_bias", "decoder.attention.bias"),
    )
    aliases: ClassVar = {"num_local_experts": "num_experts"}
    required: ClassVar = Qwen2Moe.required
    windows = "all"
    window_flag = "use_sliding_window"
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"use_sliding_window": False, "sliding_window": 4096},
        **{"mlp_only_layers": None, "decoder_sparse_step": 1, "num_experts": 128, "num_experts_per_tok": 8},
        **{"norm_topk_prob": False, "moe_intermediate_size": 768, "intermediate_size": 6144},
        **{"router_aux_loss_coef": 0.001},
    }
    key_mapping: ClassVar = {**LlamaFamily.key_mapping, **NORMS, **EXPERT_KEYS}
    tasks = LlamaFamily.tasks
