"""Kimi Linear: layers of Kimi delta attention and of latent attention without positions, and experts.

Kimi Team 2025 (Kimi Linear). Released files list the layers in `linear_attn_config`, counted from 1, and
transformers writes `layer_types` and `mlp_layer_types`; both are read and written. Dense layers have the
names of tensors of released files, `mlp`; transformers writes them as a part of the experts, which is read
too.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from polyformer.attention.mechanisms import AlternateConfig, KDAConfig, SoftmaxConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.attention.positions import NoPositionConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Tree, choice, option, with_defaults
from polyformer.models.checkpoints.families.deepseek import ATTENTION, SIZES, DeepseekFamily, RotatedLast
from polyformer.models.checkpoints.families.deepseek import EXPERTS as FEEDFORWARD
from polyformer.models.checkpoints.families.experts import ExpertsFamily
from polyformer.models.checkpoints.families.layers import (
    DENSE,
    FULL,
    SPARSE,
    check_kinds,
    feedforward_kinds,
    in_turn,
    of_layers,
)
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily, without
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Converter, Part
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import ExpertsConfig, GatedConfig
from polyformer.nn.stack.attention_options import LatentConfig

LINEAR = "linear_attention"
KDA = KDAConfig(
    heads=RecurrentHeadsConfig(key_heads=32, value_heads=32, key_size=128, value_size=128), gate_bias=False
)
GATED = GatedConfig(intermediate_size=9216)
EXPERTS = ExpertsConfig(
    expert=GATED,
    shared_expert=GATED,
    experts=256,
    top_k=8,
    scores="sigmoid",
    selection_bias=True,
    group_top=2,
    balance=0.0,
)
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")
MECHANISM = f"{ATTENTION}.mechanism"


def template() -> ModelConfig:
    """Return the Llama with latent attention, without positions, that the options change."""
    mechanism = AlternateConfig(mechanisms=(KDA, SoftmaxConfig()))
    latent = LatentConfig(size=512, query_size=None, rotary_size=64, value_size=128)
    config = model_config("llama-2-7b").override("decoder.position", NoPositionConfig())
    config = config.override("decoder.attention.mechanism", mechanism)
    return config.override("decoder.attention.latent", latent)


def heads_of(config: ModelConfig) -> RecurrentHeadsConfig | None:
    """Return the heads of the linear layers of a model; None without such layers."""
    assert config.decoder is not None
    mechanisms = map(config.decoder.attention.mechanism.for_layer, range(config.decoder.num_hidden_layers))
    return next((part.heads for part in mechanisms if isinstance(part, KDAConfig)), None)


@dataclasses.dataclass(frozen=True)
class Queries(RotatedLast):
    """The projection of queries: shared channels are last in layers with latents."""

    def for_config(self, config: ModelConfig) -> Converter:  # type: ignore[override]
        """Return the converter for the heads of a layer."""
        layer = re.search(r"layers\.(\d+)\.", self.ours[0])
        assert layer is not None
        assert config.decoder is not None
        latent = config.decoder.attention.has_latent(int(layer[1]))
        return super().for_config(config) if latent else Converter(self.ours)


@dataclasses.dataclass(frozen=True)
class TapsPart(Part):
    """The weights [C, 1, w] of one of three convolutions, which ours has side by side: [w, 3 C]."""

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the weights of the convolution."""
        return super().join([ours[0].T.unsqueeze(1)])

    def whole(self, parts: Tensor) -> Tensor:
        """Put taps before channels."""
        return parts.squeeze(1).T


@dataclasses.dataclass(frozen=True)
class Rows(Part):
    """Some rows of a matrix of ours; `layout` returns the rows of each part in a model."""

    layout: Callable[[Any], Sequence[int]]
    sizes: Sequence[int] = ()

    def for_config(self, config: Any) -> "Rows":
        """Return the converter for the rows of a model."""
        return dataclasses.replace(self, sizes=self.layout(config))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the rows of this part."""
        return ours[0].split(list(self.sizes))[self.number]


def gates(config: ModelConfig) -> Sequence[int]:
    """Return the rows of the low ranks of decays and of the output gate, and of b."""
    heads = heads_of(config)
    assert heads is not None
    return heads.value_size, heads.value_size, heads.value_heads


@dataclasses.dataclass(frozen=True)
class Rates(Converter):
    """A number for each head, [1, 1, H, 1] in their files."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Remove the dimensions of length 1."""
        return (theirs.flatten(),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Add the dimensions of length 1."""
        return ours[0].view(1, 1, -1, 1)


@dataclasses.dataclass(frozen=True)
class Channels(Converter):
    """A number for each channel of a head, [H D] in their files."""

    heads: int = 1

    def for_config(self, config: ModelConfig) -> "Channels":
        """Return the converter for the heads of a model."""
        heads = heads_of(config)
        return self if heads is None else dataclasses.replace(self, heads=heads.value_heads)

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Separate the heads."""
        return (theirs.unflatten(0, (self.heads, -1)),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Join the heads."""
        return ours[0].flatten()


@register
class KimiLinear(ExpertsFamily):
    """A decoder with linear layers and layers of latent attention, and experts in most layers."""

    model_type = "kimi_linear"
    class_prefix = "KimiLinear"
    paper = "Kimi Team 2025 (Kimi Linear)"
    template = template()
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27, "num_key_value_heads": 32}
        | {"max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "pad_token_id": 163839}
        | {"bos_token_id": 163584, "eos_token_id": 163586},
        *("intermediate_size", "hidden_act", "attention_dropout"),
    )
    aliases: ClassVar = {
        "model_max_length": "max_position_embeddings",
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
    }
    required: ClassVar = {
        **{"attention_bias": False, "hidden_act": "silu", "output_router_logits": False},
        **{"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True},
        **{"moe_layer_freq": 1, "num_nextn_predict_layers": 0},
        "tie_word_embeddings": False,  # transformers' class never ties them
    }
    parts: ClassVar = {
        "softmax": (SoftmaxConfig().to_dict(), (option("attention_dropout", 0.0, "dropout"),)),
        "kda": (
            KDA.to_dict(),
            (
                option("linear_conv_kernel_dim", 4, "short_convolution"),
                option("linear_num_heads", 32, "heads.key_heads", "heads.value_heads"),
                option("linear_head_dim", 128, "heads.key_size", "heads.value_size"),
                option("rms_norm_eps", 1e-5, "norm_eps"),
            ),
        ),
        "gated": (GATED.to_dict(), (option("intermediate_size", 9216, "intermediate_size"),)),
        "experts": (
            EXPERTS.to_dict(),
            (
                option("num_experts", 256, "experts"),
                option("num_experts_per_token", 8, "top_k"),
                choice("moe_renormalize", True, {True: "chosen", False: "all"}, "gates"),
                option("moe_intermediate_size", 1024, "expert.intermediate_size"),
                option("routed_scaling_factor", 2.446, "gate_scale"),
                option("num_expert_group", 1, "groups"),
                option("topk_group", 1, "groups_used"),
            ),
        ),
    }
    other_options: ClassVar[dict[str, Any]] = {
        **{entry.theirs: entry.default for _, mapping in parts.values() for entry in mapping},
        **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"qk_nope_head_dim": 128, "num_shared_experts": 1, "first_k_dense_replace": 1},
        **{"layer_types": None, "mlp_layer_types": None, "linear_attn_config": None},
    }
    ignored_options = (
        *("use_cache", "pretraining_tp", "qk_head_dim", "head_dim", "rope_theta", "rope_scaling"),
        "rope_parameters",
    )
    places: ClassVar = {
        **dict.fromkeys((".kv_", ".q_a_", ".q_b_"), "softmax"),
        **dict.fromkeys((".k_proj", ".v_proj", "_conv1d.", ".f_", ".g_", ".b_proj", ".dt_bias"), "kda"),
    }
    key_mapping: ClassVar = {
        **without(LlamaFamily.key_mapping, "self_attn"),
        **{
            name: entry
            for name, entry in DeepseekFamily.key_mapping.items()
            if "self_attn.q_a" in name or "self_attn.[" in name or "self_attn.kv" in name or "q_b_" in name
        },
        "layers.{i}.self_attn.q_proj": Queries((f"{ATTENTION}.query",)),
        "layers.{i}.self_attn.[k|v]_proj": f"{ATTENTION}.[key|value]",
        **{
            f"layers.{{i}}.self_attn.{name}_conv1d.weight": TapsPart((f"{MECHANISM}.taps",), number, 3)
            for number, name in enumerate(("q", "k", "v"))
        },
        **{
            f"layers.{{i}}.self_attn.{name}_proj.weight": Rows(
                (f"{ATTENTION}.gate.weight",), number, 3, gates
            )
            for number, name in enumerate(("f_a", "g_a", "b"))
        },
        "layers.{i}.self_attn.A_log": Rates((f"{MECHANISM}.log_rate",)),
        "layers.{i}.self_attn.dt_bias": Channels((f"{MECHANISM}.bias",)),
        "layers.{i}.self_attn.[f_b_proj|g_b_proj|o_norm]": f"{MECHANISM}.[decay|output_gate|norm]",
        "layers.{i}.block_sparse_moe.gate": f"{FEEDFORWARD}.router",
        "layers.{i}.block_sparse_moe.gate.e_score_correction_bias": f"{FEEDFORWARD}.selection_bias",
        "layers.{i}.block_sparse_moe.experts.{e}.[w1|w2|w3]": f"{FEEDFORWARD}.experts.{{e}}.[gate|down|up]",
        "layers.{i}.block_sparse_moe.shared_experts.[gate|up|down]_proj": (
            f"{FEEDFORWARD}.shared_expert.[gate|up|down]"
        ),
    }
    tasks: ClassVar = {name: LlamaFamily.tasks[name] for name in ("ForCausalLM", "Model")}

    def usual_key(self, key: str) -> str:
        """Return the name of a tensor in released files: transformers writes dense layers as experts."""
        return re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", key)

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether files have a tensor: the projection of queries has two names."""
        assert config.decoder is not None
        attention, layer = config.decoder.attention, re.search(r"layers\.(\d+)\.", theirs)
        assert attention.latent is not None
        if layer is not None and attention.has_latent(int(layer[1])):
            missing = ".q_proj." if attention.latent.query_size is not None else ".q_b_proj."
            if missing in theirs:
                return False
        return super().has_tensor(config, task, theirs)

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model is a decoder with latents, and with linear layers unless it was loaded."""
        decoder = config.decoder if super().fits(config) else None
        if decoder is None or decoder.attention.latent is None:
            return False
        return config.origin is not None or heads_of(config) is not None

    def config(self, hub: Tree, task: str, head: Any = None) -> ModelConfig:
        """Return the configuration as for every family, with the sizes in `linear_attn_config`."""
        linear = hub.get("linear_attn_config") or {}
        if not isinstance(linear, dict):
            raise InputError(f"config.json: linear_attn_config is {quote(linear)}, expected options")
        names = {
            "head_dim": "linear_head_dim",
            "num_heads": "linear_num_heads",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        }
        sizes = {ours: linear[theirs] for theirs, ours in names.items() if theirs in linear}
        return super().config({**hub, **sizes}, task, head)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers, and a wrong number."""
        super().check(hub)
        check_kinds("layer_types", _kinds(hub), (FULL, LINEAR), "num_hidden_layers", hub)
        feedforward_kinds(hub)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the latents, and the mechanism and the feed-forward of every layer."""
        attention = tree["decoder"]["attention"]
        self.set_mechanisms(tree, hub, ["softmax" if kind == FULL else "kda" for kind in _kinds(hub)])
        attention["latent"] |= zip(SIZES, (hub[name] for name in LATENT))
        attention["head_size"] = hub["qk_nope_head_dim"]
        parts = {kind: self.part(kind, hub) for kind in ("gated", "experts")}
        width = hub["num_shared_experts"] * hub["moe_intermediate_size"]
        parts["experts"]["shared_expert"]["intermediate_size"] = width
        kinds = ["gated" if kind == DENSE else "experts" for kind in feedforward_kinds(hub)]
        tree["decoder"]["feedforward"] = in_turn("feedforwards", [parts[kind] for kind in kinds])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of latents, and of the mechanisms and feed-forwards that the model has."""
        decoder = tree["decoder"]
        count, attention = decoder["num_hidden_layers"], decoder["attention"]
        mechanisms = self.mechanisms(tree)
        feedforwards = of_layers("feedforwards", decoder["feedforward"], count)
        hub: Tree = dict(zip(LATENT, (attention["latent"][name] for name in SIZES)))
        hub["qk_nope_head_dim"] = attention["head_size"]
        hub |= self.write_parts(feedforwards, mechanisms)
        mixed = next((part for part in feedforwards if part["kind"] == "experts"), None)
        if mixed is not None:
            shared = (mixed["shared_expert"] or {}).get("intermediate_size") or 0
            hub["num_shared_experts"] = shared // (mixed["expert"].get("intermediate_size") or 1)
        kinds = [LINEAR if part["kind"] == "kda" else FULL for part in mechanisms]
        dense = [SPARSE if part["kind"] == "experts" else DENSE for part in feedforwards]
        hub |= {"layer_types": kinds, "mlp_layer_types": dense}
        hub["model_max_length"] = tree["max_position_embeddings"]
        hub["first_k_dense_replace"] = next((i for i, kind in enumerate(dense) if kind == SPARSE), count)
        if LINEAR in kinds:
            # For the code of the released model, which counts layers from 1.
            hub["linear_attn_config"] = {
                "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == LINEAR],
                "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == FULL],
                "num_heads": hub.get("linear_num_heads"),
                "head_dim": hub.get("linear_head_dim"),
                "short_conv_kernel_size": hub.get("linear_conv_kernel_dim"),
            }
        return hub


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from either list, or as transformers with every fourth full."""
    if hub["layer_types"] is not None:
        return hub["layer_types"]
    linear, count = hub["linear_attn_config"] or {}, hub["num_hidden_layers"]
    if "full_attn_layers" not in linear or "kda_layers" not in linear:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    full, kda = set(linear["full_attn_layers"]), set(linear["kda_layers"])
    for layer in range(1, count + 1):
        if (layer in full) == (layer in kda):
            raise InputError(
                f"config.json: layer {layer} is in both lists of linear_attn_config, or in none; expected "
                "each layer from 1 in kda_layers or in full_attn_layers"
            )
    return [FULL if layer in full else LINEAR for layer in range(1, count + 1)]
