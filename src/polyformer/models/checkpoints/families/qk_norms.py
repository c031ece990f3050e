"""OLMo 2, Qwen3 and the text models of Gemma 3: decoders with norms of queries and keys.

OLMo Team 2024; Yang et al. 2025; Gemma Team 2025.
"""

import dataclasses
from typing import Any, ClassVar

from polyformer.models.checkpoints.config_mapping import Option, Tree, flag, get_path, with_defaults
from polyformer.models.checkpoints.families.common import LAST_TOKEN, SCORED
from polyformer.models.checkpoints.families.layers import (
    FULL,
    LOCAL,
)
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily, Qwen2
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.values import options, special
from polyformer.models.presets import model_config

NORMS = {"layers.{i}.self_attn.[q|k]_norm": "decoder.layers.{i}.attention.[query|key]_norm"}


def of_all_norms(mapping: tuple[Option, ...]) -> tuple[Option, ...]:
    """Return the options with the epsilon of the norms of queries and keys too."""
    return tuple(
        dataclasses.replace(option, ours=(*option.ours, "decoder.attention.qk_norm.eps"))
        if option.theirs == "rms_norm_eps"
        else option
        for option in mapping
    )


@register
class Olmo2(LlamaFamily):
    """A decoder with norms after its sub-layers, and of the whole projections of queries and keys."""

    model_type = "olmo2"
    class_prefix = "Olmo2"
    paper = "OLMo Team 2024"
    template = model_config("olmo-2-1b")
    config_mapping = (
        *with_defaults(
            of_all_norms(OPTIONS),
            {"vocab_size": 50304, "rms_norm_eps": 1e-5}
            | {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279},
        ),
        flag("attention_bias", "decoder.attention.bias"),
    )
    key_mapping: ClassVar = {
        **{key: ours for key, ours in LlamaFamily.key_mapping.items() if "layernorm" not in key},
        **NORMS,
        "layers.{i}.post_[attention|feedforward]_layernorm": "decoder.layers.{i}.block.output_norms.[0|1]",
    }
    tasks: ClassVar = {
        name: LlamaFamily.tasks[name] for name in ("ForCausalLM", "Model", "ForSequenceClassification")
    }
    sizes = ("olmo-2-1b",)


@register
class Qwen3(Qwen2):
    """A decoder with norms of each head's queries and keys; windows in some layers as in Qwen2."""

    model_type = "qwen3"
    class_prefix = "Qwen3"
    paper = "Yang et al. 2025"
    template = model_config("qwen3-0.6b")
    config_mapping = (
        *of_all_norms(Qwen2.config_mapping),
        flag("attention_bias", "decoder.attention.bias"),
    )
    other_options: ClassVar = {**Qwen2.other_options, "head_dim": 128}
    key_mapping: ClassVar = {**LlamaFamily.key_mapping, **NORMS}
    sizes = ("qwen3-0.6b",)


@register
class Gemma3Text(LlamaFamily):
    """A decoder with norms before and after its sub-layers; windows and a smaller rotary base in most layers.

    transformers reads no soft cap of scores in this family, so it is refused.
    """

    model_type = "gemma3_text"
    class_prefix = "Gemma3"
    paper = "Gemma Team 2025"
    template = model_config("gemma-3-1b")
    config_mapping = of_all_norms(
        (
            *options(
                "decoder",
                {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216},
                {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
                {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072},
                {"rms_norm_eps": 1e-6, "attention_dropout": 0.0, "initializer_range": 0.02},
                special(0, 2, 1),
            ),
            flag("attention_bias", "decoder.attention.bias"),
        )
    )
    required: ClassVar = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    windows = "layers"
    thetas: ClassVar = {FULL: ("rope_theta", 1_000_000.0), LOCAL: ("rope_local_base_freq", 10_000.0)}
    other_options: ClassVar[dict[str, Any]] = {
        **{"head_dim": 256, "query_pre_attn_scalar": 256, "rope_parameters": None, "rope_scaling": None},
        **{"layer_types": None, "sliding_window": 4096, "sliding_window_pattern": 6},
        **dict(thetas.values()),
    }
    ignored_options = ("use_cache", "_sliding_window_pattern")
    key_mapping: ClassVar = {
        **{key: ours for key, ours in LlamaFamily.key_mapping.items() if "layernorm" not in key},
        **NORMS,
        "layers.{i}.[input|pre_feedforward]_layernorm": "decoder.layers.{i}.block.norms.[0|1]",
        "layers.{i}.post_[attention|feedforward]_layernorm": "decoder.layers.{i}.block.output_norms.[0|1]",
    }
    tasks: ClassVar = {
        "ForCausalLM": LlamaFamily.tasks["ForCausalLM"],
        "TextModel": LAST_TOKEN,
        "TextForSequenceClassification": SCORED,
    }
    sizes = ("gemma-3-1b",)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the scale too."""
        super().read_other_options(tree, hub)
        tree["decoder"]["attention"]["mechanism"]["scale"] = hub["query_pre_attn_scalar"] ** -0.5

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the scale too."""
        scale = get_path(tree, "decoder.attention.mechanism.scale")
        number = self.other_options["query_pre_attn_scalar"] if scale is None else round(scale**-2)
        return {**super().write_other_options(tree), "query_pre_attn_scalar": number}
