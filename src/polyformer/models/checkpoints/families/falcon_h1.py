"""Falcon-H1: Mamba-2 and softmax attention side by side in each layer. Zuo et al. 2025.

Files have factors of nearly every projection, which the width of a model determines (muP). Here they are
options of the parts; the factor of keys is part of the scale of scores.
"""

import math
from typing import Any, ClassVar

from polyformer.attention.mechanisms import SSDConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Option, Tree, flag, get_path, option, with_defaults
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.families.mamba2 import INFINITY, mixer_keys, step_limits, write_limits
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.values import check_values
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import HeadConfig, LanguageModelConfig
from polyformer.nn.stack import BesideConfig

ATTENTION, LAYER = "decoder.attention", "decoder.layers.{i}"
MIXER, BESIDE = f"{ATTENTION}.mechanism", f"{ATTENTION}.beside"
HEADS = RecurrentHeadsConfig(key_heads=1, value_heads=128, key_size=256, value_size=8)
FACTORS = {
    "input_scales": ("ssm_in_multiplier", "attention_in_multiplier"),
    "output_scales": ("ssm_out_multiplier", "attention_out_multiplier"),
}
"""Factors of Mamba-2 and of attention."""

WITHOUT_SCALE = {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}


def factors(theirs: str, ours: str) -> Option:
    """Return an option for factors; a single factor of 1 is left out."""
    usual = WITHOUT_SCALE[theirs]
    return Option(
        theirs,
        None,
        (ours,),
        lambda scales: None if scales in (None, usual) else scales,
        lambda scales: usual if scales is None else list(scales),
    )


@register
class FalconH1(LlamaFamily):
    """A decoder with Mamba-2 and softmax attention side by side in each layer, and factors of projections."""

    model_type = "falcon_h1"
    class_prefix = "FalconH1"
    paper = "Zuo et al. 2025"
    template = (
        model_config("llama-2-7b")
        .override("mechanism", SSDConfig(heads=HEADS, norm_of="none"))
        .override(BESIDE, BesideConfig())
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8, "pad_token_id": 0}
            | {"max_position_embeddings": 8192},
            *("attention_dropout", "hidden_act", "rms_norm_eps"),
        ),
        option("attention_dropout", 0.0, f"{BESIDE}.second.dropout"),
        option("rms_norm_eps", 1e-5, "decoder.norm.eps", f"{MIXER}.norm_eps"),
        option("mamba_d_conv", 4, f"{MIXER}.short_convolution"),
        option("mamba_conv_bias", True, f"{MIXER}.convolution_bias"),
        option("mamba_n_groups", 1, f"{MIXER}.heads.key_heads"),
        option("mamba_d_state", 256, f"{MIXER}.heads.key_size"),
        option("mamba_n_heads", 128, f"{MIXER}.heads.value_heads"),
        option("mamba_d_head", 8, f"{MIXER}.heads.value_size"),
        option("embedding_multiplier", 1.0, "embedding.multiplier"),
        factors("mlp_multipliers", "decoder.feedforward.scales"),
        factors("ssm_multipliers", f"{MIXER}.scales"),
        flag("attention_bias", f"{BESIDE}.bias"),
        flag("mlp_bias", "decoder.feedforward.bias"),
    )
    # The activation of the convolutions too.
    required: ClassVar = {"mamba_proj_bias": False, "hidden_act": "silu"}
    other_options: ClassVar[dict[str, Any]] = {
        **LlamaFamily.other_options,
        **{"mamba_d_ssm": 1024, "mamba_expand": 2, "time_step_limit": [0.0, INFINITY]},
        **{"mamba_rms_norm": False, "mamba_norm_before_gate": True, "projectors_bias": False},
        **{"key_multiplier": 1.0, **{name: 1.0 for names in FACTORS.values() for name in names}},
    }
    ignored_options = ("use_cache", "num_logits_to_keep", "mamba_chunk_size", "layers_block_type")
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "layers.{i}.self_attn.[q|k|v|o]_proj": f"{LAYER}.attention.beside.[query|key|value|output]",
        **mixer_keys("layers.{i}.mamba"),
        "layers.{i}.feed_forward.[gate|up|down]_proj": f"{LAYER}.feedforward.[gate|up|down]",
        "layers.{i}.[input|pre_ff]_layernorm": f"{LAYER}.block.norms.[0|1]",
        "final_layernorm": "decoder.final_norm",
    }
    tasks: ClassVar = {
        "ForCausalLM": Task(
            LanguageModelConfig(),
            {"lm_head": "head"},
            (option("lm_head_multiplier", 1.0, "logit_scale"),),
            tied_keys={"lm_head.weight": "model.embed_tokens.weight"},
        ),
        "Model": LlamaFamily.tasks["Model"],
    }

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family, with the width of heads that files leave out."""
        check_values(hub)
        if hub.get("mamba_d_head", "auto") in ("auto", None):
            inner = _inner({**self.other_options, **hub})
            hub = {**hub, "mamba_d_head": inner // hub.get("mamba_n_heads", 128)}
        return super().config(hub, task, head)

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model is a decoder with softmax attention next to Mamba-2."""
        attention = config.decoder.attention if super().fits(config) and config.decoder else None
        return attention is not None and attention.beside is not None and attention.mechanism.kind == "ssd"

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for heads that do not cover the inner width."""
        super().check(hub)
        inner, heads = _inner(hub), hub["mamba_n_heads"] * hub["mamba_d_head"]
        if inner != heads:
            raise InputError(
                f"config.json: mamba_d_ssm is {quote(hub['mamba_d_ssm'])}, expected mamba_n_heads x "
                f"mamba_d_head = {heads}"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set rotary positions, the factors of both kinds of attention, the norm and the limits of steps."""
        super().read_other_options(tree, hub)
        attention = tree["decoder"]["attention"]
        for ours, theirs in FACTORS.items():
            attention["beside"][ours] = [hub[name] for name in theirs]
        attention["bias"] = ["output"] if hub["projectors_bias"] else False
        gated = "before_gate" if hub["mamba_norm_before_gate"] else "gated"
        attention["mechanism"] |= {"norm_of": gated if hub["mamba_rms_norm"] else "none", **step_limits(hub)}
        if hub["key_multiplier"] != 1.0:
            attention["beside"]["second"]["scale"] = hub["key_multiplier"] * _usual_scale(tree)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return rotary positions, the factors of both kinds of attention, the norm and the limits."""
        attention = tree["decoder"]["attention"]
        mixer, beside = attention["mechanism"], attention.get("beside") or {}
        norm, heads = mixer.get("norm_of"), mixer.get("heads") or {}
        scales = {
            name: value
            for ours, theirs in FACTORS.items()
            for name, value in zip(theirs, beside.get(ours) or (1.0, 1.0))
        }
        return {
            **super().write_other_options(tree),
            **scales,
            **write_limits(mixer),
            "mamba_rms_norm": norm != "none",
            "mamba_norm_before_gate": norm != "gated",
            "mamba_d_ssm": (heads.get("value_heads") or 0) * (heads.get("value_size") or 0),
            "projectors_bias": bool(attention["bias"]),
            "key_multiplier": _key_factor(get_path(beside, "second.scale"), _usual_scale(tree)),
        }


def _inner(hub: Tree) -> int:
    """Return the channels of the values of Mamba-2."""
    inner = hub["mamba_d_ssm"]
    return hub["mamba_expand"] * hub.get("hidden_size", 4096) if inner is None else inner


def _usual_scale(tree: Tree) -> float:
    """Return the scale of scores without a factor of keys."""
    attention = tree["decoder"]["attention"]
    size = attention["head_size"] or tree["hidden_size"] // attention["num_attention_heads"]
    return size**-0.5


def _key_factor(scale: float | None, usual: float) -> float:
    """Return the factor that gives this scale again."""
    factor = 1.0 if scale is None else scale / usual
    # The quotient may differ from the factor in its last digit.
    near = (factor, math.nextafter(factor, math.inf), math.nextafter(factor, 0.0))
    return next((number for number in near if number * usual == scale), factor)
