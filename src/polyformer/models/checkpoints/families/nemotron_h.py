"""Nemotron-H: Mamba-2, softmax attention and feed-forwards in the order of a pattern. NVIDIA 2025.

Each of their layers has one sub-layer with a norm before it: `linear_attention`, `full_attention`, `mlp` or
`moe`; older files write a text such as "M-M*-", with "E" for experts. A feed-forward and the layer before it
are one layer here, so that 52 of their layers may be 28 of ours. A feed-forward that follows another, or
comes first, has no layer before it and is refused.

Steps of Mamba-2 are at least `time_step_min`, as in transformers, which does not read `time_step_limit`. Its
single steps with a cache have no limit; here all passes are the same.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polyformer.attention.mechanisms import SoftmaxConfig, SSDConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.attention.positions import NoPositionConfig
from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.checkpoints.config_mapping import Tree, activation, choice, flag, option, with_defaults
from polyformer.models.checkpoints.families.experts import ExpertsFamily
from polyformer.models.checkpoints.families.layers import FULL, in_turn, of_layers
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.families.mamba2 import mixer_keys
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Link
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import DenseConfig, ExpertsConfig

LINEAR, DENSE, SPARSE = "linear_attention", "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": DENSE, "E": SPARSE}
OLDER = {"mamba": LINEAR, "attention": FULL}
LAYER = "decoder.layers.{i}"
FEEDFORWARD = "layers.{i}+.mixer"
"""The feed-forward of a layer, the layer after it in files."""

INNER = DenseConfig(activation="squared_relu", bias=False)
EXPERTS = ExpertsConfig(
    **{"expert": INNER, "shared_expert": INNER, "scores": "sigmoid", "selection_bias": True},
    **{"group_top": 2, "balance": 0.0, "experts": 8},
)
BIAS, ACT = "mlp_bias", "mlp_hidden_act"


@register
class NemotronH(ExpertsFamily):
    """A decoder of Mamba-2, softmax attention, feed-forwards and experts, in the order of a pattern."""

    model_type = "nemotron_h"
    class_prefix = "NemotronH"
    base_model_prefix = "backbone"
    paper = "NVIDIA 2025"
    template = model_config("llama-2-7b").override("decoder.position", NoPositionConfig())
    parts: ClassVar = {
        "softmax": (SoftmaxConfig().to_dict(), (option("attention_dropout", 0.0, "dropout"),)),
        "ssd": (
            SSDConfig(
                heads=RecurrentHeadsConfig(key_heads=8, value_heads=128, key_size=128, value_size=64)
            ).to_dict(),
            (
                option("conv_kernel", 4, "short_convolution"),
                option("use_conv_bias", True, "convolution_bias"),
                option("n_groups", 8, "heads.key_heads"),
                option("ssm_state_size", 128, "heads.key_size"),
                option("mamba_head_dim", 64, "heads.value_size"),
                option("mamba_num_heads", 128, "heads.value_heads"),
                option("layer_norm_epsilon", 1e-5, "norm_eps"),
                option("time_step_min", 0.001, "min_step"),
            ),
        ),
        "dense": (
            INNER.to_dict(),
            (
                option("intermediate_size", 21504, "intermediate_size"),
                flag(BIAS, "bias"),
                activation(ACT, "relu2", "activation"),
            ),
        ),
        "experts": (
            EXPERTS.to_dict(),
            (
                option("n_routed_experts", 8, "experts"),
                option("num_experts_per_tok", 2, "top_k"),
                option("moe_intermediate_size", 7688, "expert.intermediate_size"),
                option("moe_shared_expert_intermediate_size", 7688, "shared_expert.intermediate_size"),
                option("routed_scaling_factor", 1.0, "gate_scale"),
                option("n_group", 1, "groups"),
                option("topk_group", 1, "groups_used"),
                choice("norm_topk_prob", True, {True: "chosen", False: "all"}, "gates"),
                flag(BIAS, "shared_expert.bias"),
                activation(ACT, "relu2", "expert.activation", "shared_expert.activation"),
            ),
        ),
    }
    places: ClassVar = {**{f".{name}_proj": "softmax" for name in "qkvo"}, ".out_proj": "ssd"}
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 131072, "num_key_value_heads": 8, "max_position_embeddings": 4096}
            | {"pad_token_id": 0},
            *("num_hidden_layers", "intermediate_size", "hidden_act", "attention_dropout", "rms_norm_eps"),
        ),
        option("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
        option("head_dim", 128, "decoder.attention.head_size"),
    )
    aliases: ClassVar = {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"}
    # transformers never ties the tables; a bias would be of one kind of layers only
    required: ClassVar = {
        **{"tie_word_embeddings": False, "use_bias": False, "attention_bias": False},
        **{"mamba_proj_bias": False, "mamba_hidden_act": "silu", "sliding_window": None},
        **{"moe_latent_size": None, "n_shared_experts": 1, "output_router_logits": False},
    }
    other_options: ClassVar[dict[str, Any]] = {
        **{option.theirs: option.default for _, mapping in parts.values() for option in mapping},
        **{"layers_block_type": None, "hybrid_override_pattern": None, "num_hidden_layers": None},
    }
    ignored_options = (
        *("use_cache", "num_logits_to_keep", "use_mamba_kernels", "expand", "chunk_size", "residual_in_fp32"),
        *("time_step_limit", "time_step_max", "time_step_floor", "mamba_ssm_cache_dtype", "hidden_dropout"),
        *("rescale_prenorm_residual", "moe_shared_expert_overlap", "num_nextn_predict_layers"),
        "mtp_layers_block_type",
    )
    key_mapping: ClassVar = {
        "embeddings": "tokens",
        "layers.{i}.norm": f"{LAYER}.block.norms.0",
        "layers.{i}+.norm": f"{LAYER}.block.norms.1",
        "layers.{i}.mixer.[q|k|v|o]_proj": f"{LAYER}.attention.[query|key|value|output]",
        **mixer_keys("layers.{i}.mixer"),
        f"{FEEDFORWARD}.[up|down]_proj": f"{LAYER}.feedforward.[up|down]",
        f"{FEEDFORWARD}.gate": f"{LAYER}.feedforward.router",
        f"{FEEDFORWARD}.gate.e_score_correction_bias": f"{LAYER}.feedforward.selection_bias",
        f"{FEEDFORWARD}.experts.{{e}}.[up|down]_proj": f"{LAYER}.feedforward.experts.{{e}}.[up|down]",
        f"{FEEDFORWARD}.shared_experts.[up|down]_proj": f"{LAYER}.feedforward.shared_expert.[up|down]",
        "norm_f": "decoder.final_norm",
    }
    ignored_keys = ("mtp.*",)
    tasks: ClassVar = {
        "ForCausalLM": dataclasses.replace(LlamaFamily.tasks["ForCausalLM"], tied_keys={}),
        "Model": LlamaFamily.tasks["Model"],
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers, and a feed-forward without a layer before it."""
        kinds = _kinds(hub)
        for number, kind in enumerate(kinds):
            if kind not in LETTERS.values():
                raise unknown("layers_block_type", kind, LETTERS.values())
            before = kinds[number - 1] if number else None
            if kind in (DENSE, SPARSE) and before not in (LINEAR, FULL):
                raise InputError(
                    f"config.json: layers_block_type has {quote(kind)} as layer {number} after "
                    f"{quote(before)}, expected {quote(LINEAR)} or {quote(FULL)} before it; layers of a "
                    "feed-forward alone are not there"
                )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the mechanism and the feed-forward of every layer."""
        after = {DENSE: self.part("dense", hub), SPARSE: self.part("experts", hub), None: {"kind": "none"}}
        pairs, decoder = _layers(_kinds(hub)), tree["decoder"]
        decoder["num_hidden_layers"] = len(pairs)
        self.set_mechanisms(tree, hub, ["ssd" if kind == LINEAR else "softmax" for kind, _ in pairs])
        decoder["feedforward"] = in_turn("feedforwards", [after[kind] for _, kind in pairs])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the kinds of their layers, and the options of the kinds that the model has."""
        decoder = tree["decoder"]
        mechanisms = self.mechanisms(tree)
        feedforwards = of_layers("feedforwards", decoder["feedforward"], len(mechanisms))
        kinds = {"ssd": LINEAR, "softmax": FULL, "dense": DENSE, "experts": SPARSE}
        pairs = zip(mechanisms, feedforwards)
        listed = [kinds[part["kind"]] for pair in pairs for part in pair if part["kind"] in kinds]
        ends = {
            name: value
            for name, value in super(ExpertsFamily, self).write_other_options(tree).items()
            if name == "eos_token_id"
        }
        return {
            **ends,
            **self.write_parts(feedforwards, mechanisms),
            "layers_block_type": listed,
            "num_hidden_layers": len(listed),
        }

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links as for every family, with the numbers of their layers."""
        assert config.decoder is not None
        parts = map(config.decoder.feedforward.for_layer, range(config.decoder.num_hidden_layers))
        numbers, number = [], 0
        for part in parts:
            numbers.append(number)
            number += 1 if part.kind == "none" else 2

        def renumbered(match: re.Match[str]) -> str:
            return f"layers.{numbers[int(match[1])] + len(match[2])}."

        return [
            dataclasses.replace(link, theirs=re.sub(r"layers\.(\d+)(\+?)\.", renumbered, link.theirs))
            for link in super().links(config, task, own)
        ]


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each of their layers: from the list, or from the text of older files."""
    kinds: list[str] | None = hub["layers_block_type"]
    if kinds is None and hub["hybrid_override_pattern"] is not None:
        kinds = [LETTERS.get(str(x), str(x)) for x in hub["hybrid_override_pattern"]]
    return [LINEAR, SPARSE, FULL, DENSE] if kinds is None else [OLDER.get(kind, kind) for kind in kinds]


def _layers(kinds: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return the kinds of our layers: of attention, and of the feed-forward after it or None."""
    following = [*kinds[1:], None]
    return [
        (kind, after if after in (DENSE, SPARSE) else None)
        for kind, after in zip(kinds, following)
        if kind in (LINEAR, FULL)
    ]
