"""Decoders of Llama's layout with other norms, blocks, feed-forwards or rotated channels, as tables.

Gemma and Gemma 2 (Gemma Team 2024), StarCoder 2 (Lozhkov et al. 2024), Phi (Li et al. 2023), StableLM
(Bellagente et al. 2024), GLM-4 (GLM Team 2024), OLMo 3 (OLMo Team 2025) and Granite (Granite Team 2024).
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.checkpoints.config_mapping import (
    ACTIVATIONS,
    Option,
    Tree,
    choice,
    flag,
    get_path,
    option,
    with_defaults,
)
from polyformer.models.checkpoints.families.layers import FULL, LOCAL
from polyformer.models.checkpoints.families.llama import FUSED_GATE, OPTIONS, LlamaFamily, without
from polyformer.models.checkpoints.families.qk_norms import Gemma3Text, Olmo2
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.values import options
from polyformer.models.presets import model_config
from polyformer.nn.block import SandwichConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig

LAYER = "decoder.layers.{i}"
LAYER_NORMED = (
    model_config("llama-2-7b")
    .override("decoder.norm", LayerNormConfig())
    .override("embedding.embedding_dropout", 0.0)
)
BIASED_NORMS = options("decoder", {"layer_norm_eps": 1e-5})


def input_biases(theirs: str, default: bool) -> Option:
    """Return an option for the biases of queries, keys and values; the output has none."""
    return Option(
        theirs,
        default,
        ("decoder.attention.bias",),
        lambda biased: ["query", "key", "value"] if biased else False,
        bool,
    )


@register
class Gemma(LlamaFamily):
    """A decoder with centered norms, scaled embeddings and a gate of GELU.

    The oldest files say "gelu" and mean its approximation by tanh.
    """

    model_type = "gemma"
    class_prefix = "Gemma"
    paper = "Gemma Team 2024"
    template = (
        model_config("gemma-3-1b")
        .override("block", "pre")
        .override("decoder.attention.qk_norm", None)
        .override("mechanism", SoftmaxConfig())
        .override("position.bases", ())
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
            | {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192}
            | {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True},
            "hidden_act",
        ),
        choice(
            "hidden_act",
            "gelu_pytorch_tanh",
            {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS, "gelu": "gelu_tanh"},
            "decoder.feedforward.activation",
        ),
        flag("attention_bias", "decoder.attention.bias"),
    )
    required: ClassVar = {"use_bidirectional_attention": False}
    other_options: ClassVar = {**LlamaFamily.other_options, "head_dim": 256}
    ignored_options = ("use_cache", "hidden_activation")
    tasks: ClassVar = without(LlamaFamily.tasks, "ForQuestionAnswering")


@register
class Starcoder2(LlamaFamily):
    """A decoder with layer norms, a dense feed-forward and biases, and a window in all layers or none."""

    model_type = "starcoder2"
    class_prefix = "Starcoder2"
    paper = "Lozhkov et al. 2024"
    template = LAYER_NORMED.override("decoder.feedforward", DenseConfig()).override(
        "decoder.attention.bias", True
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30}
            | {"num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"}
            | {"max_position_embeddings": 4096, "initializer_range": 0.018042, "bos_token_id": 50256}
            | {"eos_token_id": 50256, "tie_word_embeddings": True},
            "rms_norm_eps",
        ),
        *options("decoder", {"norm_epsilon": 1e-5, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
        flag("use_bias", "decoder.attention.bias", "decoder.feedforward.bias", default=True),
    )
    windows = "all"
    other_options: ClassVar = {**LlamaFamily.other_options, "sliding_window": None}
    key_mapping: ClassVar = {
        **without(LlamaFamily.key_mapping, ".mlp."),
        "layers.{i}.mlp.[c_fc|c_proj]": f"{LAYER}.feedforward.[up|down]",
    }
    tasks: ClassVar = without(LlamaFamily.tasks, "ForQuestionAnswering")


@register
class Phi(LlamaFamily):
    """A decoder of parallel blocks with one layer norm, and half of each head rotated: Phi-1, 1.5 and 2."""

    model_type = "phi"
    class_prefix = "Phi"
    paper = "Li et al. 2023"
    template = (
        dataclasses.replace(LAYER_NORMED, head=LanguageModelConfig(bias=True))
        .override("block", "parallel")
        .override("decoder.attention.bias", True)
        .override("decoder.feedforward", DenseConfig())
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
            | {"hidden_act": "gelu_new"},
            "rms_norm_eps",
        ),
        *options("decoder", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        *BIASED_NORMS,
    )
    required: ClassVar = {"qk_layernorm": False}
    other_options: ClassVar = {**LlamaFamily.other_options, "partial_rotary_factor": 0.5}
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "layers.{i}.self_attn.[q_proj|k_proj|v_proj|dense]": f"{LAYER}.attention.[query|key|value|output]",
        "layers.{i}.mlp.fc[1|2]": f"{LAYER}.feedforward.[up|down]",
        "layers.{i}.input_layernorm": f"{LAYER}.block.norms.0",
        "final_layernorm": "decoder.final_norm",
    }
    tasks: ClassVar = {
        **without(LlamaFamily.tasks, "ForQuestionAnswering"),
        "ForCausalLM": Task(
            LanguageModelConfig(bias=True),
            {"lm_head": "head"},
            tied_keys=LlamaFamily.tasks["ForCausalLM"].tied_keys,
        ),
    }


class SequentialOrParallel(LlamaFamily):
    """The base class of decoders with blocks in sequence, or with `use_parallel_residual` parallel."""

    parallel: ClassVar[Tree] = {"kind": "parallel"}

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the block too."""
        super().read_other_options(tree, hub)
        tree["decoder"]["block"] = self.parallel if hub["use_parallel_residual"] else {"kind": "pre"}

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the block too."""
        parallel = get_path(tree, "decoder.block.kind") == "parallel"
        return {**super().write_other_options(tree), "use_parallel_residual": parallel}


@register
class StableLm(SequentialOrParallel):
    """A decoder with layer norms, a quarter of each head rotated, and blocks in sequence or parallel.

    `hidden_dropout` follows attention here too, while transformers applies it to feed-forwards only.
    """

    model_type = "stablelm"
    class_prefix = "StableLm"
    paper = "Bellagente et al. 2024"
    template = LAYER_NORMED
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_key_value_heads": 32}
            | {"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 0},
            "rms_norm_eps",
        ),
        *options("decoder", {"hidden_dropout": 0.0}),
        *BIASED_NORMS,
        input_biases("use_qkv_bias", False),
    )
    required: ClassVar = {"qk_layernorm": False}
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"partial_rotary_factor": 0.25, "use_parallel_residual": False},
    }
    tasks: ClassVar = without(LlamaFamily.tasks, "ForQuestionAnswering")


@register
class Glm4(LlamaFamily):
    """A decoder with norms before and after its sub-layers, and half of each head rotated in pairs."""

    model_type = "glm4"
    class_prefix = "Glm4"
    paper = "GLM Team 2024"
    template = (
        model_config("llama-2-7b")
        .override("decoder.block", SandwichConfig())
        .override("decoder.position.layout", "pairs")
        .override("decoder.attention.head_size", 128)
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40}
            | {"num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7}
            | {"pad_token_id": 151329, "bos_token_id": None, "eos_token_id": 151329},
        ),
        input_biases("attention_bias", True),
    )
    other_options: ClassVar = {**LlamaFamily.other_options, "head_dim": 128, "partial_rotary_factor": 0.5}
    key_mapping: ClassVar = {
        **without(LlamaFamily.key_mapping, "layernorm", "gate"),
        **FUSED_GATE,
        "layers.{i}.[input|post_attention]_layernorm": f"{LAYER}.block.norms.[0|1]",
        "layers.{i}.post_[self_attn|mlp]_layernorm": f"{LAYER}.block.output_norms.[0|1]",
    }
    tasks: ClassVar = without(LlamaFamily.tasks, "ForQuestionAnswering")


@register
class Olmo3(Olmo2):
    """OLMo 2 with a window in three of four layers, and a rotary base for each kind of layer."""

    model_type = "olmo3"
    class_prefix = "Olmo3"
    paper = "OLMo Team 2025"
    windows = "layers"
    full_every = 4
    thetas: ClassVar = dict.fromkeys((FULL, LOCAL), ("rope_theta", 500_000.0))
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None},
    }
    sizes = ()


SOFT_CAP = "decoder.attention.mechanism.soft_cap"


@register
class Gemma2(Gemma3Text):
    """Gemma 3 with soft caps of scores and logits, no norms of queries and keys, and one rotary base."""

    model_type = "gemma2"
    class_prefix = "Gemma2"
    paper = "Gemma Team 2024"
    template = (
        model_config("gemma-3-1b").override("decoder.attention.qk_norm", None).override("position.bases", ())
    )
    config_mapping = (
        *with_defaults(
            Gemma.config_mapping,
            {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
            | {"num_attention_heads": 8, "num_key_value_heads": 4},
            "hidden_act",
        ),
        *options("decoder", {"hidden_activation": "gelu_pytorch_tanh"}),
        option("attn_logit_softcapping", 50.0, SOFT_CAP),
    )
    required: ClassVar = {"use_bidirectional_attention": False}
    full_every = 2
    thetas: ClassVar = {}
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": None, "sliding_window": 4096},
    }
    ignored_options = ("use_cache", "hidden_act", "cache_implementation")
    key_mapping: ClassVar = without(Gemma3Text.key_mapping, "_norm")
    tasks: ClassVar = {
        **without(LlamaFamily.tasks, "ForQuestionAnswering"),
        "ForCausalLM": dataclasses.replace(
            LlamaFamily.tasks["ForCausalLM"],
            config_mapping=(option("final_logit_softcapping", 30.0, "soft_cap"),),
        ),
    }
    sizes = ()


@register
class Granite(LlamaFamily):
    """A Llama with factors of token vectors, scores, residual branches and logits."""

    model_type = "granite"
    class_prefix = "Granite"
    paper = "Granite Team 2024"
    template = model_config("llama-2-7b").override("mechanism", SoftmaxConfig(scale=1.0))
    config_mapping = (
        *OPTIONS,
        flag("attention_bias", "decoder.attention.bias"),
        flag("mlp_bias", "decoder.feedforward.bias"),
        option("embedding_multiplier", 1.0, "embedding.multiplier"),
        option("attention_multiplier", 1.0, "decoder.attention.mechanism.scale"),
        option("residual_multiplier", 1.0, "decoder.block.residual_scale"),
    )
    tasks: ClassVar = {
        "ForCausalLM": dataclasses.replace(
            LlamaFamily.tasks["ForCausalLM"],
            # rounded, as the inverse of an inverse differs in the last digit
            config_mapping=(
                Option(
                    "logits_scaling",
                    1.0,
                    ("logit_scale",),
                    lambda scale: 1 / scale,
                    lambda factor: round(1 / factor, 10),
                ),
            ),
        ),
        "Model": LlamaFamily.tasks["Model"],
    }
