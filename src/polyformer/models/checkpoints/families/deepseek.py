"""DeepSeek-V2 and DeepSeek-V3: Llamas with latent attention, and with experts after the first layers.

In their heads rotated channels come last, and in ours first. With YaRN their scale of scores has the square
of a temperature (`mscale_all_dim`) as a factor. DeepSeek-AI 2024 (DeepSeek-V2, DeepSeek-V3).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from polyformer.core.errors import InputError, unknown
from polyformer.models.checkpoints.config_mapping import (
    Tree,
    activation,
    get_path,
    temperature,
    with_defaults,
)
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Converter
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import (
    AlternateFeedForwardConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GatedConfig,
)
from polyformer.nn.stack.attention_options import LatentConfig

ACTIVATION = activation("hidden_act", "silu")
SIZES = ("size", "query_size", "rotary_size", "value_size")
EXPERT_OPTIONS = {
    **{"n_routed_experts": "experts", "num_experts_per_tok": "top_k", "routed_scaling_factor": "gate_scale"},
    **{"n_group": "groups", "topk_group": "groups_used"},
}
GROUPED = "group_limited_greedy"
ATTENTION, EXPERTS = "decoder.layers.{i}.attention", "decoder.layers.{i}.feedforward"


def dense_template() -> ModelConfig:
    """Return the Llama with latent attention that the options change."""
    config = model_config("llama-2-7b").override("decoder.position.layout", "pairs")
    latent = LatentConfig(size=512, query_size=1536, rotary_size=64, value_size=128)
    config = config.override("decoder.attention.latent", latent)
    return config.override("decoder.attention.head_size", 128)


@dataclasses.dataclass(frozen=True)
class RotatedLast(Converter):
    """A projection with the `rotated` channels of each head last: weights [H D, E], biases [H D]."""

    heads: int | None = None  # by default those of the model
    rotated: int = 0

    def for_config(self, config: ModelConfig) -> "RotatedLast":
        """Return the converter for the heads of a model."""
        assert config.decoder is not None
        attention = config.decoder.attention
        rotated = attention.rotary_width(config.hidden_size)
        return dataclasses.replace(self, heads=self.heads or attention.num_attention_heads, rotated=rotated)

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Move the rotated channels to the start of each head."""
        return (self._rolled(theirs, self.rotated),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Move the rotated channels to the end of each head."""
        return self._rolled(ours[0], -self.rotated)

    def _rolled(self, x: Tensor, channels: int) -> Tensor:
        assert self.heads is not None
        return x.unflatten(0, (self.heads, -1)).roll(channels, 1).flatten(0, 1)


class DeepseekFamily(LlamaFamily):
    """The base class of DeepSeek-V2 and DeepSeek-V3."""

    template = dense_template()
    other_options: ClassVar[dict[str, Any]] = {
        **LlamaFamily.other_options,
        **{"hidden_act": "silu", "attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"rope_interleave": True, "mlp_bias": False},
    }
    ignored_options = ("use_cache", "pretraining_tp", "output_router_logits", "qk_head_dim")
    key_mapping: ClassVar = {
        **{key: ours for key, ours in LlamaFamily.key_mapping.items() if "self_attn" not in key},
        "layers.{i}.self_attn.q_a_proj": f"{ATTENTION}.query_latent",
        "layers.{i}.self_attn.[q|kv]_a_layernorm": f"{ATTENTION}.[query_latent|latent]_norm",
        "layers.{i}.self_attn.q_proj": RotatedLast((f"{ATTENTION}.query",)),
        "layers.{i}.self_attn.q_b_proj": RotatedLast((f"{ATTENTION}.query",)),
        "layers.{i}.self_attn.kv_a_proj_with_mqa": RotatedLast((f"{ATTENTION}.latent",), heads=1),
        "layers.{i}.self_attn.[kv_b|o]_proj": f"{ATTENTION}.[up|output]",
        "layers.{i}.mlp.gate": f"{EXPERTS}.router",
        "layers.{i}.mlp.gate.e_score_correction_bias": f"{EXPERTS}.selection_bias",
        "layers.{i}.mlp.experts.{e}.[gate|up|down]_proj": f"{EXPERTS}.experts.{{e}}.[gate|up|down]",
        "layers.{i}.mlp.shared_experts.[gate|up|down]_proj": f"{EXPERTS}.shared_expert.[gate|up|down]",
    }
    tasks: ClassVar = {
        name: LlamaFamily.tasks[name] for name in ("ForCausalLM", "Model", "ForSequenceClassification")
    }

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether files have a tensor: the projection of queries has two names."""
        assert config.decoder is not None
        latent = config.decoder.attention.latent
        missing = "q_proj" if latent is not None and latent.query_size is not None else "q_b_proj"
        return f".{missing}." not in theirs

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model is a decoder with latent attention."""
        decoder = config.decoder if super().fits(config) else None
        return decoder is not None and decoder.attention.latent is not None

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for layers of experts without the number of experts of a token."""
        super().check(hub)
        if hub["first_k_dense_replace"] < hub["num_hidden_layers"]:
            _check_given(hub, "num_experts_per_tok")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the latents, rotary positions, the scale of scores, and the feed-forwards of the layers."""
        super().read_other_options(tree, {**hub, "head_dim": hub["qk_nope_head_dim"]})
        decoder, attention = tree["decoder"], tree["decoder"]["attention"]
        theirs = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")
        attention["latent"] |= zip(SIZES, (hub[name] for name in theirs))
        if hub["attention_bias"]:  # their projection of queries without a latent has none
            attention["bias"] = True if hub["q_lora_rank"] is not None else ["key", "output"]
        decoder["position"]["layout"] = "pairs" if hub["rope_interleave"] else "halves"
        scaling = (hub.get("rope_scaling") or hub.get("rope_parameters") or {}).get("mscale_all_dim")
        extension = decoder["position"]["extension"]
        if scaling and extension is not None:
            width = hub["qk_nope_head_dim"] + hub["qk_rope_head_dim"]
            attention["mechanism"]["scale"] = width**-0.5 * temperature(extension["factor"], scaling) ** 2
        decoder["feedforward"] = self._feedforward(hub).to_dict()

    def _feedforward(self, hub: Tree) -> FeedForwardConfig:
        """Return the feed-forwards of the layers: the first dense, the others experts."""
        act, bias = ACTIVATION.read(hub["hidden_act"]), hub["mlp_bias"]
        width, layers = hub["moe_intermediate_size"], hub["num_hidden_layers"]
        dense = GatedConfig(intermediate_size=hub["intermediate_size"], activation=act, bias=bias)
        first = min(hub["first_k_dense_replace"], layers)
        if first == layers:
            return dense
        experts = ExpertsConfig(
            expert=GatedConfig(intermediate_size=width, activation=act),
            shared_expert=dataclasses.replace(dense, intermediate_size=hub["n_shared_experts"] * width),
            experts=hub["n_routed_experts"],
            top_k=hub["num_experts_per_tok"],
            gate_scale=hub["routed_scaling_factor"],
            balance=0.0,  # their loss has no such term
            **self.routing(hub),
        )
        if first == 0:
            return experts
        return AlternateFeedForwardConfig(feedforwards=(dense,) * first + (experts,) * (layers - first))

    def routing(self, hub: Tree) -> Tree:
        """Return our options of the choice of experts."""
        raise NotImplementedError

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the entries of latents, positions, the scale of scores and the feed-forwards."""
        attention = get_path(tree, "decoder.attention") or {}
        latent, rope = attention["latent"], get_path(tree, "decoder.position") or {}
        hub = super().write_other_options(tree)
        nope = hub.pop("head_dim", None)
        size, query, rotary, value = (latent[name] for name in SIZES)
        hub |= {"kv_lora_rank": size, "q_lora_rank": query, "qk_rope_head_dim": rotary, "v_head_dim": value}
        hub |= {"qk_nope_head_dim": nope, "attention_bias": bool(attention["bias"])}
        hub["rope_interleave"] = rope.get("layout") == "pairs"
        factor, scale = hub["rope_parameters"].get("factor", 1), get_path(attention, "mechanism.scale")
        if scale is not None and nope is not None and rotary is not None and factor > 1:
            mean = (scale * (nope + rotary) ** 0.5) ** 0.5
            hub["rope_parameters"]["mscale_all_dim"] = round((mean - 1) / (0.1 * math.log(factor)), 6)
        layers = get_path(tree, "decoder.num_hidden_layers")
        return hub | self._write_feedforward(get_path(tree, "decoder.feedforward"), layers)

    def _write_feedforward(self, tree: Tree, layers: int) -> Tree:
        """Return the entries of the feed-forwards; other options show as lost when they are read again."""
        parts = tree.get("feedforwards") or [tree]
        dense = [part for part in parts if part["kind"] == "gated"]
        mixed = next((part for part in parts if part["kind"] == "experts"), None)
        hub: Tree = {"first_k_dense_replace": layers if mixed is None else len(dense)}
        if mixed is not None:
            width, shared = mixed["expert"].get("intermediate_size", 1), mixed["shared_expert"] or {}
            hub |= {theirs: mixed[ours] for theirs, ours in EXPERT_OPTIONS.items()}
            hub |= self.write_routing(mixed)
            number = shared.get("intermediate_size", 0) // width
            hub |= {"moe_intermediate_size": width, "n_shared_experts": number}
            dense.append(shared)  # of the same form; its width does not matter without dense layers
        first = dense[0] if dense else tree
        hub |= {"intermediate_size": first.get("intermediate_size"), "mlp_bias": first.get("bias") is True}
        return {**hub, "hidden_act": ACTIVATION.write(first.get("activation"))}

    def write_routing(self, tree: Tree) -> Tree:
        """Return the inverse of `routing` for the options of experts."""
        raise NotImplementedError


@register
class DeepseekV2(DeepseekFamily):
    """A decoder with gates of a softmax over all experts, and groups ranked by their best expert.

    transformers never normalizes the gates over the chosen experts, whatever `norm_topk_prob` says.
    """

    model_type = "deepseek_v2"
    class_prefix = "DeepseekV2"
    paper = "DeepSeek-AI 2024 (DeepSeek-V2)"
    config_mapping = with_defaults(OPTIONS, {"vocab_size": 102400}, "intermediate_size", "hidden_act")
    required: ClassVar = {
        **{"rope_interleave": True, "norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    }
    other_options: ClassVar = {
        **DeepseekFamily.other_options,
        **{"intermediate_size": 11008, "moe_intermediate_size": 1407, "first_k_dense_replace": 0},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None},
        **{"routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": None, "topk_group": None},
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for an unknown choice of experts, and for groups without numbers."""
        super().check(hub)
        if hub["topk_method"] not in ("greedy", GROUPED):
            raise unknown("topk_method", hub["topk_method"], ("greedy", GROUPED))
        if hub["topk_method"] == GROUPED:
            _check_given(hub, "n_group", "topk_group")

    def routing(self, hub: Tree) -> Tree:
        """Return a softmax over all experts, and groups if the files choose by groups."""
        if hub["topk_method"] == "greedy" or hub["n_group"] == 1:
            return {"gates": "all"}
        return {"gates": "all", "groups": hub["n_group"], "groups_used": hub["topk_group"]}

    def write_routing(self, tree: Tree) -> Tree:
        """Return the method of the choice."""
        return {"topk_method": "greedy" if tree["groups"] == 1 else GROUPED}


@register
class DeepseekV3(DeepseekFamily):
    """A decoder with sigmoid scores, a selection bias, and groups ranked by their two best experts."""

    model_type = "deepseek_v3"
    class_prefix = "DeepseekV3"
    paper = "DeepSeek-AI 2024 (DeepSeek-V3)"
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1},
        *("intermediate_size", "hidden_act"),
    )
    required: ClassVar = {
        **{"mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    }
    other_options: ClassVar = {
        **DeepseekFamily.other_options,
        **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    }
    ignored_options = (*DeepseekFamily.ignored_options, "num_nextn_predict_layers", "num_mtp_layers")
    # The layers of multi-token prediction in the released checkpoint.
    ignored_keys = (*DeepseekFamily.ignored_keys, "model.layers.61.*")
    tasks: ClassVar = {
        **DeepseekFamily.tasks,
        "ForTokenClassification": LlamaFamily.tasks["ForTokenClassification"],
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for groups without numbers."""
        super().check(hub)
        _check_given(hub, "n_group", "topk_group")

    def routing(self, hub: Tree) -> Tree:
        """Return sigmoid scores, the selection bias and the groups."""
        gates = "chosen" if hub["norm_topk_prob"] else "all"
        groups = {"groups": hub["n_group"], "groups_used": hub["topk_group"], "group_top": 2}
        return {"scores": "sigmoid", "gates": gates, "selection_bias": True, **groups}

    def write_routing(self, tree: Tree) -> Tree:
        """Return whether the gates are normalized over the chosen experts."""
        return {"norm_topk_prob": tree["gates"] == "chosen"}


def _check_given(hub: Tree, *names: str) -> None:
    """Raise `InputError` for an option that is null."""
    for name in names:
        if hub[name] is None:
            raise InputError(f"config.json: {name} is None, expected an integer from 1")
