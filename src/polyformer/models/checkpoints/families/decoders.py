"""Decoders of Llama's layout with other norms, blocks, feed-forwards or rotated channels, as tables.

Gemma (Gemma Team 2024), StarCoder 2 (Lozhkov et al. 2024), Phi (Li et al. 2023), StableLM (Bellagente et al.
2024), GLM-4 (GLM Team 2024), OLMo 3 (OLMo Team 2025), Gemma 2 (Gemma Team 2024), Command R7B (Cohere 2024),
SmolLM3 (Bakouch et al. 2025) and EXAONE 4 (LG AI Research 2025).
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
from polyformer.models.checkpoints.families.layers import FULL, LOCAL, period
from polyformer.models.checkpoints.families.llama import FUSED_GATE, OPTIONS, LlamaFamily, Mistral, without
from polyformer.models.checkpoints.families.qk_norms import Gemma3Text, Olmo2, of_all_norms
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
    template = LAYER_NORMED.override("decoder.feedforward", DenseConfig())
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
        LAYER_NORMED.override("block", "parallel")
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


@register
class StableLm(LlamaFamily):
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

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the block too."""
        super().read_other_options(tree, hub)
        if hub["use_parallel_residual"]:
            tree["decoder"]["block"] = {"kind": "parallel"}

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the block too."""
        parallel = tree["decoder"]["block"]["kind"] == "parallel"
        return {**super().write_other_options(tree), "use_parallel_residual": parallel}


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


class PartlyRotated(LlamaFamily):
    """The base class of decoders in which only layers with a window are rotated."""

    windows = "layers"
    full_every = 4

    def rotated(self, hub: Tree) -> list[bool]:
        """Return whether each layer is rotated."""
        return [kind == LOCAL for kind in self.kinds(hub)]

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the layers without rotation too."""
        super().read_other_options(tree, hub)
        layers = period(self.rotated(hub))
        tree["decoder"]["position"]["rotated"] = [] if layers == [True] else layers


@register
class Cohere2(PartlyRotated):
    """A decoder of parallel blocks with layer norms without biases; full layers are not rotated."""

    model_type = "cohere2"
    class_prefix = "Cohere2"
    paper = "Cohere 2024"
    template = (
        model_config("llama-2-7b")
        .override("decoder.norm", LayerNormConfig(bias=False))
        .override("block", "parallel")
        .override("decoder.position.layout", "pairs")
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40}
            | {"num_attention_heads": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True}
            | {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 255001},
            "rms_norm_eps",
        ),
        *BIASED_NORMS,
        flag("attention_bias", "decoder.attention.bias"),
    )
    required: ClassVar = {"use_qk_norm": False}
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
    }
    ignored_options = ("use_cache", "_sliding_window_pattern")
    key_mapping: ClassVar = {
        **without(LlamaFamily.key_mapping, "layernorm"),
        "layers.{i}.input_layernorm": f"{LAYER}.block.norms.0",
    }
    tasks: ClassVar = {
        "ForCausalLM": dataclasses.replace(
            LlamaFamily.tasks["ForCausalLM"], config_mapping=(option("logit_scale", 0.0625, "logit_scale"),)
        ),
        "Model": LlamaFamily.tasks["Model"],
    }


@register
class Exaone4(PartlyRotated):
    """A decoder with norms after its sub-layers and of each head's queries and keys; full layers next to
    layers with windows are not rotated.
    """

    model_type = "exaone4"
    class_prefix = "Exaone4"
    paper = "LG AI Research 2025"
    template = model_config("olmo-2-1b").override("decoder.attention.qk_norm_of", "head")
    config_mapping = with_defaults(
        of_all_norms(OPTIONS),
        {"vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32}
        | {"rms_norm_eps": 1e-5, "bos_token_id": 0},
    )
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
    }
    key_mapping: ClassVar = Olmo2.key_mapping
    tasks: ClassVar = Mistral.tasks

    def kinds(self, hub: Tree) -> list[str]:
        """Return the kind of each layer; all are full without a window."""
        if hub["sliding_window"] is None and hub["layer_types"] is None:
            return [FULL] * hub["num_hidden_layers"]
        return super().kinds(hub)

    def rotated(self, hub: Tree) -> list[bool]:
        """Return whether each layer is rotated: all are if the model has no window."""
        return [hub["sliding_window"] is None or kind == LOCAL for kind in self.kinds(hub)]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return no window if all layers are rotated."""
        hub = super().write_other_options(tree)
        full = LOCAL not in hub["layer_types"] and not tree["decoder"]["position"]["rotated"]
        return {**hub, "sliding_window": None} if full else hub


@register
class SmolLM3(PartlyRotated):
    """A decoder that rotates three of four layers; the others have windows with `use_sliding_window`."""

    model_type = "smollm3"
    class_prefix = "SmolLM3"
    paper = "Bakouch et al. 2025"
    template = model_config("smollm2-1.7b")
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
            | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "pad_token_id": 128004}
            | {"bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True},
        ),
        flag("attention_bias", "decoder.attention.bias"),
        flag("mlp_bias", "decoder.feedforward.bias"),
    )
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{
            "rope_theta": 2_000_000.0,
            "sliding_window": None,
            "layer_types": None,
            "use_sliding_window": False,
        },
        **{"no_rope_layers": None, "no_rope_layer_interval": 4},
    }
    tasks: ClassVar = Mistral.tasks

    def rotated(self, hub: Tree) -> list[bool]:
        """Return whether each layer is rotated."""
        every, layers = hub["no_rope_layer_interval"], range(hub["num_hidden_layers"])
        return [bool(flag) for flag in hub["no_rope_layers"] or [(i + 1) % every for i in layers]]

    def kinds(self, hub: Tree) -> list[str]:
        """Return the kind of each layer: from transformers' list, or else from the options."""
        if hub["layer_types"] is not None:
            return hub["layer_types"]
        windows = hub["use_sliding_window"] and hub["sliding_window"] is not None
        return [LOCAL if windows and not rotated else FULL for rotated in self.rotated(hub)]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the layers that are rotated too."""
        hub, layers = super().write_other_options(tree), tree["decoder"]["num_hidden_layers"]
        rotated = get_path(tree, "decoder.position.rotated") or [True]
        flags = [int(rotated[i % len(rotated)]) for i in range(layers)]
        return {**hub, "no_rope_layers": flags, "use_sliding_window": LOCAL in hub["layer_types"]}
