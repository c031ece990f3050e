"""Decoders after GPT-3: OPT, XGLM, BioGPT, GPT-NeoX, BLOOM, MPT and Falcon.

Zhang et al. 2022; Lin et al. 2022; Luo et al. 2022; Black et al. 2022; BLOOM: Le Scao et al. 2022;
MosaicML 2023; Almazrouei et al. 2023.

BLOOM, MPT and some Falcons have ALiBi. transformers computes BLOOM's GELU with a constant of eight digits,
which changes outputs by 1e-9, and rounds the biases of Falcon to bfloat16. Files have queries, keys and
values in one matrix, by key heads.
"""

from collections.abc import Sequence
from typing import ClassVar

from polyformer.attention.positions import AlibiConfig, LearnedConfig, RopeConfig, SinusoidalConfig
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.checkpoints.config_mapping import (
    Tree,
    activation,
    check_same,
    flag,
    get_path,
    option,
    with_defaults,
)
from polyformer.models.checkpoints.families.bart import stack
from polyformer.models.checkpoints.families.common import LAST_TOKEN, QUESTION_ANSWERING, SCORED
from polyformer.models.checkpoints.families.decoders import BIASED_NORMS, SequentialOrParallel
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily, without
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Fused, Interleaved
from polyformer.models.checkpoints.values import options, special
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import LanguageModelConfig, TagConfig

LAYER = "decoder.layers.{i}"
PROJECTIONS = tuple(f"{LAYER}.attention.{name}" for name in ("query", "key", "value"))
DENSE = model_config("gpt2").override("embedding.embedding_dropout", 0.0).override("dropout", 0.0)


def by_key_heads(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return the rows of queries, keys and values, by key heads."""
    assert config.decoder is not None
    attention = config.decoder.attention
    width, groups = attention.width(config.hidden_size), attention.kv_heads
    return groups, (attention.num_attention_heads * width, groups * width, groups * width)


FUSED = Interleaved(PROJECTIONS, by_key_heads)


def decoder_tasks(base: str, table: str, dropout: str, rate: float, head: str = "lm_head") -> dict[str, Task]:
    """Return the classes of a decoder: its trunk's prefix, its token table, and the dropout of tags."""
    tags = Task(TagConfig(), {"classifier": "head.output"}, (option(dropout, rate, "dropout"),))
    tied = dict.fromkeys((f"{head}.weight", "lm_head.weight"), f"{base}.{table}.weight")
    return {
        "ForCausalLM": Task(LanguageModelConfig(), {head: "head"}, tied_keys=tied),
        "Model": LAST_TOKEN,
        "ForSequenceClassification": SCORED,
        "ForTokenClassification": tags,
        "ForQuestionAnswering": QUESTION_ANSWERING,
    }


@register
class Opt(Family):
    """A decoder with two unused rows of positions, pre-norm or (350 million parameters) post-norm."""

    model_type = "opt"
    class_prefix = "OPT"
    paper = "Zhang et al. 2022"
    objective = "causal language modelling"
    base_model_prefix = "model"
    template = DENSE.override("decoder.position", LearnedConfig(offset=2))
    config_mapping = options(
        "decoder",
        {"vocab_size": 50272, "hidden_size": 768, "max_position_embeddings": 2048, "num_hidden_layers": 12},
        {"num_attention_heads": 12, "activation_function": "relu", "dropout": 0.1, "attention_dropout": 0.0},
        {"init_std": 0.02, **special(1, 2, 2)},
        option("ffn_dim", 3072, "decoder.feedforward.intermediate_size"),
        option("layerdrop", 0.0, "decoder.layerdrop"),
        flag("enable_bias", "decoder.attention.bias", "decoder.feedforward.bias", default=True),
    )
    required: ClassVar = {"layer_norm_elementwise_affine": True}
    other_options: ClassVar = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": None,
    }
    ignored_options = ("use_cache",)
    key_mapping: ClassVar = {
        "decoder.embed_tokens": "tokens",
        **stack("decoder", 2, {"embed_positions": ".position.tables.0", "final_layer_norm": ".final_norm"}),
    }
    tasks: ClassVar = {
        name: task
        for name, task in decoder_tasks("model", "decoder.embed_tokens", "dropout", 0.1).items()
        if name != "ForTokenClassification"
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for token vectors of another width than the layers."""
        why = "; projections without biases before and after the layers are not there"
        check_same("word_embed_proj_dim", "hidden_size", hub, why)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the block, and whether there is a norm at the end."""
        before = hub["do_layer_norm_before"]
        tree["decoder"]["block"] = {"kind": "pre" if before else "post"}
        tree["decoder"]["final_norm"] = not (before and hub["_remove_final_layer_norm"])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the block, and whether there is a norm at the end."""
        return {
            "do_layer_norm_before": get_path(tree, "decoder.block.kind") == "pre",
            "_remove_final_layer_norm": not get_path(tree, "decoder.final_norm"),
            "word_embed_proj_dim": tree["hidden_size"],
        }


# OPT's layers outside of a module "decoder".
LAYERS = {
    name.removeprefix("decoder."): ours
    for name, ours in stack("decoder", 2, {"layer_norm": ".final_norm"}).items()
}


@register
class Xglm(Family):
    """A decoder of many languages with scaled embeddings and sinusoids, which count from 2."""

    model_type = "xglm"
    class_prefix = "XGLM"
    paper = "Lin et al. 2022"
    objective = "causal language modelling in 30 languages"
    base_model_prefix = "model"
    template = DENSE.override(
        "decoder.position", SinusoidalConfig(layout="halves", inclusive=True, offset=2)
    ).override("embedding.embedding_dropout", None)
    config_mapping = options(
        "decoder",
        {"vocab_size": 256008, "d_model": 1024, "max_position_embeddings": 2048, "num_layers": 24},
        {"attention_heads": 16, "activation_function": "gelu", "scale_embedding": True, "init_std": 0.02},
        {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.0, **special(1, 0, 2)},
        option("ffn_dim", 4096, "decoder.feedforward.intermediate_size"),
        option("layerdrop", 0.0, "decoder.layerdrop"),
    )
    required: ClassVar = {"add_cross_attention": False}
    ignored_options = ("use_cache", "decoder_start_token_id")
    key_mapping: ClassVar = {"embed_tokens": "tokens", **LAYERS}
    ignored_keys = ("*embed_positions.weights",)
    tasks: ClassVar = without(
        decoder_tasks("model", "embed_tokens", "dropout", 0.1), "Classification", "Question"
    )

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for a padding id above 1: its row of zeros would be a position of the text."""
        if (hub["pad_token_id"] or 0) > 1:
            raise InputError(f"config.json: pad_token_id is {hub['pad_token_id']}, expected 0, 1 or null")


@register
class BioGpt(Family):
    """A decoder of biomedical texts with scaled embeddings, and two unused rows of positions.

    The epsilon of its norms, 1e-5, is not an option: transformers does not read `layer_norm_eps`.
    """

    model_type = "biogpt"
    class_prefix = "BioGpt"
    paper = "Luo et al. 2022"
    objective = "causal language modelling of biomedical texts"
    base_model_prefix = "biogpt"
    template = Opt.template.override("embedding.embedding_dropout", None)
    config_mapping = options(
        "decoder",
        {"vocab_size": 42384, "hidden_size": 1024, "max_position_embeddings": 1024, "num_hidden_layers": 24},
        {"num_attention_heads": 16, "intermediate_size": 4096, "hidden_act": "gelu", "scale_embedding": True},
        {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "activation_dropout": 0.0},
        {"initializer_range": 0.02, **special(1, 0, 2)},
        option("layerdrop", 0.0, "decoder.layerdrop"),
    )
    ignored_options = ("use_cache", "layer_norm_eps")
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "embed_positions": "decoder.position.tables.0",
        **LAYERS,
    }
    tasks: ClassVar = without(
        decoder_tasks("biogpt", "embed_tokens", "hidden_dropout_prob", 0.1, "output_projection"), "Question"
    )


NEOX_NAMES = {
    "layers.{i}.attention.query_key_value": FUSED,
    "layers.{i}.attention.dense": f"{LAYER}.attention.output",
    "layers.{i}.mlp.dense_[h_to_4h|4h_to_h]": f"{LAYER}.feedforward.[up|down]",
    "layers.{i}.[input|post_attention]_layernorm": f"{LAYER}.block.norms.[0|1]",
}


@register
class GptNeoX(SequentialOrParallel):
    """A decoder with parallel blocks of two norms, and a quarter of each head rotated; Pythia too."""

    model_type = "gpt_neox"
    class_prefix = "GPTNeoX"
    paper = "Black et al. 2022"
    base_model_prefix = "gpt_neox"
    template = DENSE.override("decoder.position", RopeConfig(fraction=0.25)).override(
        "embedding.embedding_dropout", None
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44}
            | {"num_attention_heads": 64, "hidden_act": "gelu", "bos_token_id": 0},
            *("rms_norm_eps", "num_key_value_heads"),
        ),
        *options("decoder", {"hidden_dropout": 0.0}),
        *BIASED_NORMS,
        flag("attention_bias", "decoder.attention.bias", default=True),
    )
    aliases: ClassVar = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"partial_rotary_factor": 0.25, "use_parallel_residual": True},
    }
    ignored_options = ("use_cache", "is_decoder")
    key_mapping: ClassVar = {"embed_in": "tokens", **NEOX_NAMES, "final_layer_norm": "decoder.final_norm"}
    ignored_keys = ("*rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias")
    tasks: ClassVar = decoder_tasks("gpt_neox", "embed_in", "classifier_dropout", 0.1, "embed_out")
    parallel: ClassVar[Tree] = {"kind": "parallel", "separate_norms": True}


@register
class Bloom(Family):
    """A decoder with ALiBi and a norm of the token vectors."""

    model_type = "bloom"
    class_prefix = "Bloom"
    paper = "Le Scao et al. 2022"
    objective = "causal language modelling in 46 languages"
    base_model_prefix = "transformer"
    template = DENSE.override("decoder.position", AlibiConfig()).override("embedding.normed", True)
    config_mapping = options(
        "decoder",
        {"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5},
        {"initializer_range": 0.02, "hidden_dropout": 0.0, "attention_dropout": 0.0, **special(None, 1, 2)},
    )
    aliases: ClassVar = {"n_embed": "hidden_size"}
    required: ClassVar = {"apply_residual_connection_post_layernorm": False}
    ignored_options = ("use_cache", "pretraining_tp", "slow_but_exact")
    key_mapping: ClassVar = {
        "word_embeddings": "tokens",
        "word_embeddings_layernorm": "decoder_embedding.norm",
        **without({f"h.{key.partition('.')[2]}": ours for key, ours in NEOX_NAMES.items()}, ".attention."),
        "h.{i}.self_attention.query_key_value": FUSED,
        "h.{i}.self_attention.dense": f"{LAYER}.attention.output",
        "ln_f": "decoder.final_norm",
    }
    tasks: ClassVar = decoder_tasks("transformer", "word_embeddings", "hidden_dropout", 0.0)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the inner width, which is not an option."""
        tree["decoder"]["feedforward"]["intermediate_size"] = 4 * tree["hidden_size"]


ATTENTION_DEFAULTS: Tree = {
    **{"attn_type": "multihead_attention", "clip_qkv": None, "prefix_lm": False, "qk_ln": False},
    **{"attn_uses_sequence_id": False, "alibi": True, "alibi_bias_max": 8},
}


@register
class Mpt(Family):
    """A decoder with ALiBi and no biases.

    `attn_pdrop` is the dropout of attention weights and of sub-layers; the other dropouts have no effect.
    """

    model_type = "mpt"
    class_prefix = "Mpt"
    paper = "MosaicML 2023"
    objective = "causal language modelling"
    base_model_prefix = "transformer"
    template = (
        DENSE.override("decoder.position", AlibiConfig())
        .override("decoder.norm", LayerNormConfig(bias=False))
        .override("decoder.attention.bias", False)
        .override("decoder.feedforward.bias", False)
        .override("decoder.feedforward.activation", "gelu")
    )
    config_mapping = options(
        "decoder",
        {"vocab_size": 50368, "d_model": 2048, "n_layers": 24, "n_heads": 16, "layer_norm_epsilon": 1e-5},
        {"initializer_range": 0.02, **special()},
        option("max_seq_len", 2048, "max_position_embeddings"),
    )
    required: ClassVar = {"expansion_ratio": 4, "logit_scale": None, "no_bias": True}
    other_options: ClassVar = {"attn_config": None}
    ignored_options = (
        *("use_cache", "resid_pdrop", "emb_pdrop", "learned_pos_emb", "init_device", "embedding_fraction"),
        *("norm_type", "verbose"),
    )
    key_mapping: ClassVar = {
        "wte": "tokens",
        "blocks.{i}.norm_[1|2]": f"{LAYER}.block.norms.[0|1]",
        "blocks.{i}.attn.Wqkv": Fused(PROJECTIONS),
        "blocks.{i}.attn.out_proj": f"{LAYER}.attention.output",
        "blocks.{i}.ffn.[up|down]_proj": f"{LAYER}.feedforward.[up|down]",
        "norm_f": "decoder.final_norm",
    }
    tasks: ClassVar = decoder_tasks("transformer", "wte", "hidden_dropout", 0.1)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for options of attention with another value than the supported one."""
        own = hub["attn_config"] or {}
        for name, supported in ATTENTION_DEFAULTS.items():
            if own.get(name, supported) != supported:
                raise InputError(
                    f"config.json: {name} of attn_config is {quote(own[name])}, and only "
                    f"{quote(supported)} is supported"
                )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the inner width, the scale of scores and the dropout."""
        own, decoder = hub["attn_config"] or {}, tree["decoder"]
        decoder["feedforward"]["intermediate_size"] = 4 * tree["hidden_size"]
        decoder["attention"]["mechanism"]["scale"] = own.get("softmax_scale")
        decoder["attention"]["mechanism"]["dropout"] = decoder["dropout"] = own.get("attn_pdrop", 0.0)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of attention."""
        mechanism = get_path(tree, "decoder.attention.mechanism") or {}
        # transformers takes an integer
        own = {"softmax_scale": mechanism.get("scale"), "attn_pdrop": mechanism.get("dropout") or 0}
        return {"attn_config": {**ATTENTION_DEFAULTS, **own}}


@register
class Falcon(LlamaFamily):
    """A decoder with one key head (7B), or several and two norms in a block (40B), or with ALiBi (1B).

    Blocks of `new_decoder_architecture` are always parallel. transformers' dropouts differ in training: a
    block in sequence has that of attention weights after attention, and rotated heads have none of weights.
    """

    model_type = "falcon"
    class_prefix = "Falcon"
    paper = "Almazrouei et al. 2023"
    base_model_prefix = "transformer"
    template = DENSE.override("decoder.position", RopeConfig()).override("num_key_value_heads", 12)
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71, "bos_token_id": 11}
            | {"eos_token_id": 11, "tie_word_embeddings": True},
            *("rms_norm_eps", "num_key_value_heads", "intermediate_size", "hidden_act"),
        ),
        *options("decoder", {"hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5}),
        activation("activation", "gelu", "decoder.feedforward.activation"),
        flag("bias", "decoder.attention.bias", "decoder.feedforward.bias"),
    )
    aliases: ClassVar = {"n_embed": "hidden_size"}
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"num_kv_heads": None, "multi_query": True, "parallel_attn": True, "alibi": False},
        **{"new_decoder_architecture": False, "num_ln_in_parallel_attn": None, "ffn_hidden_size": None},
    }
    key_mapping: ClassVar = {
        **Bloom.key_mapping,
        "h.{i}.ln_[attn|mlp]": f"{LAYER}.block.norms.[0|1]",
    }
    tasks: ClassVar = decoder_tasks("transformer", "word_embeddings", "hidden_dropout", 0.0)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for a new block in sequence, which transformers does not compute."""
        super().check(hub)
        if hub["new_decoder_architecture"] and not hub["parallel_attn"]:
            raise InputError(
                "config.json: parallel_attn is False, expected True with new_decoder_architecture"
            )
        if hub["num_ln_in_parallel_attn"] not in (None, 1, 2):
            raise unknown("num_ln_in_parallel_attn", str(hub["num_ln_in_parallel_attn"]), ("1", "2"))

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether a norm has the names of this block."""
        assert config.decoder is not None
        separate = getattr(config.decoder.block, "separate_norms", False)
        return not any(
            name in theirs for name in (("_layernorm.",) if separate else (".ln_attn.", ".ln_mlp."))
        )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the key heads, the block, positions and the inner width."""
        new, decoder = hub["new_decoder_architecture"], tree["decoder"]
        attention, heads = decoder["attention"], decoder["attention"]["num_attention_heads"]
        if hub["alibi"]:
            scale = (tree["hidden_size"] // heads) ** -0.5
            decoder["position"] = AlibiConfig(slope_scale=scale).to_dict()
        else:
            super().read_other_options(tree, hub)
        several = hub["num_kv_heads"] if new and hub["num_kv_heads"] is not None else heads
        attention["num_key_value_heads"] = several if new or not hub["multi_query"] else 1
        separate = new and hub["num_ln_in_parallel_attn"] in (None, 2)
        parallel = {"kind": "parallel", "separate_norms": separate}
        decoder["block"] = parallel if new or hub["parallel_attn"] else {"kind": "pre"}
        decoder["feedforward"]["intermediate_size"] = hub["ffn_hidden_size"] or 4 * tree["hidden_size"]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the key heads, the block, positions and the inner width."""
        decoder, alibi = tree["decoder"], get_path(tree, "decoder.position.kind") == "alibi"
        heads, groups = (
            get_path(decoder, f"attention.num_{name}_heads") for name in ("attention", "key_value")
        )
        separate = bool(decoder["block"].get("separate_norms"))
        new = separate or groups not in (None, 1, heads)
        return {
            **({} if alibi else super().write_other_options(tree)),
            "alibi": alibi,
            "num_kv_heads": groups,
            "multi_query": groups == 1,
            "parallel_attn": decoder["block"]["kind"] == "parallel",
            "new_decoder_architecture": new,
            "num_ln_in_parallel_attn": (2 if separate else 1) if new else None,
            "ffn_hidden_size": decoder["feedforward"].get("intermediate_size"),
        }
