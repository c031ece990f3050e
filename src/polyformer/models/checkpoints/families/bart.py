"""BART, a post-norm encoder-decoder with learned positions, and its descendants.

Lewis et al. 2020; mBART: Liu et al. 2020; Marian: Junczys-Dowmunt et al. 2018; M2M-100: Fan et al. 2021;
Pegasus: Zhang et al. 2020; BigBird-Pegasus: Zaheer et al. 2020; Blenderbot: Roller et al. 2021.

BART's decoder without an encoder has weights of a cross-attention that it never computes, and untied models
have a token table that they never read: both are kept as unused tensors (`Transformer.unused_tensors`).

BigBird-Pegasus has BigBird's encoder, and BART's decoder in pre-norm order. In training, transformers applies
neither attention dropout in block-sparse attention nor activation dropout in the encoder. Here attention
dropout applies to both stacks, and activation dropout only to the decoder.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import ClassVar

from polyformer.attention.positions import LearnedConfig, SinusoidalConfig
from polyformer.models.checkpoints.config_mapping import Option, Tree, check_same, flag, option, with_defaults
from polyformer.models.checkpoints.families.bigbird import BlockSparseFamily
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Unsqueezed, layered
from polyformer.models.checkpoints.values import options
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, EmbedConfig, LanguageModelConfig, SpanConfig

ATTENTION = {"self_attn.[q|k|v|out]_proj": "attention.[query|key|value|output]"}


def stack(
    side: str, norms: int, ends: Mapping[str, str], attention: Mapping[str, str] = ATTENTION
) -> dict[str, str | Converter]:
    """Return the tensors of a stack that are not shared, with `norms` norms in a layer.

    ends: the modules around the layers, by their names. attention: the projections of self-attention.
    """
    layer = {
        **attention,
        "self_attn_layer_norm": "block.norms.0",
        "fc[1|2]": "feedforward.[up|down]",
        "final_layer_norm": f"block.norms.{norms - 1}",
    }
    if norms == 3:
        layer["encoder_attn.[q|k|v|out]_proj"] = "cross_attention.[query|key|value|output]"
        layer["encoder_attn_layer_norm"] = "block.norms.1"
    return {
        **{f"{side}.{theirs}": f"{side}{ours}" for theirs, ours in ends.items()},
        **layered(f"{side}.layers.{{i}}", f"{side}.layers.{{i}}", layer),
    }


POSITIONS = {"embed_positions": ".position.tables.0"}
ENDS = {**POSITIONS, "layernorm_embedding": "_embedding.norm"}
# the token table that both stacks share, and the tables of models that do not share it
TABLES = {"shared": "tokens", "encoder.embed_tokens": "tokens", "decoder.embed_tokens": "decoder_tokens"}
OPTIONS = options(
    "encoder decoder",
    {"vocab_size": 50265, "d_model": 1024, "max_position_embeddings": 1024},
    {"encoder_layers": 12, "encoder_ffn_dim": 4096, "encoder_attention_heads": 16, "encoder_layerdrop": 0.0},
    {"decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16, "decoder_layerdrop": 0.0},
    {"activation_function": "gelu", "dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0},
    {"init_std": 0.02, "scale_embedding": False, "pad_token_id": 1, "eos_token_id": 2},
    option("decoder_start_token_id", 2, "special.bos"),
    option("tie_word_embeddings", True, "embedding.tied", "embedding.shared"),
)
LM_HEAD = {"lm_head.weight": "head.weight"}


def stack_tables(base: str) -> dict[str, str]:
    """Return the stacks' names of the shared token table."""
    return {f"{base}{side}.embed_tokens.weight": f"{base}shared.weight" for side in ("encoder", "decoder")}


# A token table that no untied model reads.
SHARED = ("{base}shared.weight",)

TIED = {"lm_head.weight": "model.shared.weight", **stack_tables("model.")}
MODEL = Task(EmbedConfig(normalize=False), tied_keys=stack_tables(""), prefixed=False, unused_keys=SHARED)


@register
class Bart(Family):
    """An encoder-decoder that reconstructs noised text."""

    model_type = "bart"
    class_prefix = "Bart"
    paper = "Lewis et al. 2020"
    objective = "denoising: text infilling and shuffled sentences"
    base_model_prefix = "model"
    template = model_config("bart-base")
    config_mapping = OPTIONS
    # transformers describes the whole model by its encoder
    aliases: ClassVar = {
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    required: ClassVar = {
        "add_final_layer_norm": False,
        "normalize_before": False,
        "normalize_embedding": True,
        "static_position_embeddings": False,
        "extra_pos_embeddings": 2,
    }
    ignored_options = (
        *("bos_token_id", "chunk_size_feed_forward", "forced_eos_token_id"),
        *("is_decoder", "is_encoder_decoder", "use_cache"),
    )
    key_mapping: ClassVar = {**TABLES, **stack("encoder", 2, ENDS), **stack("decoder", 3, ENDS)}
    ignored_keys = ("*coder.embed_tokens.weight", "*coder.version")
    head_dropouts = ("classifier_dropout",)
    num_labels = 3
    tasks: ClassVar[Mapping[str, Task]] = {
        # final_logits_bias is a buffer [1, V] of zeros in all published checkpoints
        "ForConditionalGeneration": Task(
            LanguageModelConfig(bias=True, frozen_bias=True),
            {**LM_HEAD, "final_logits_bias": Unsqueezed(("head.bias",))},
            tied_keys=TIED,
            unused_keys=SHARED,
        ),
        "Model": MODEL,
        # it classifies the state of the last end token, in the decoder
        "ForSequenceClassification": Task(
            ClassifyConfig(dropout=0.0, drops_twice=True),
            {"classification_head.[dense|out_proj]": "head.[dense|output]"},
            (option("eos_token_id", 2, "end_token"),),
            stack_tables("model."),
            unused_keys=SHARED,
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, tied_keys=stack_tables("model."), unused_keys=SHARED
        ),
        "ForCausalLM": Task(
            LanguageModelConfig(),
            LM_HEAD,
            tied_keys=dict.fromkeys(
                ["lm_head.weight", "model.shared.weight"], "model.decoder.embed_tokens.weight"
            ),
            without="encoder",
            unused_keys=("{base}decoder.layers.*.encoder_attn*",),
            trunk={"decoder.embed_tokens": "tokens", **stack("decoder", 2, ENDS)},
        ),
    }
    sizes = ("bart-base", "bart-large")

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether a token table is of a model that shares it, or of one that does not."""
        # A model has either the shared table or the encoder's own.
        other = "encoder.embed_tokens" if config.embedding.shared else "shared"
        return bool(self.tasks[task].without) or theirs.removeprefix("model.") != f"{other}.weight"


@register
class M2M100(Bart):
    """An encoder-decoder for translation, with the output language forced as its first token: BART's layers
    in pre-norm order. NLLB has the same format.

    Positions are counted from the padding token's id + 1, over the tokens that are not padding.
    """

    model_type = "m2m_100"
    class_prefix = "M2M100"
    paper = "Fan et al. 2021"
    objective = "translation in all directions"
    template = model_config("m2m100-418m")
    config_mapping = (
        Option(
            "pad_token_id",
            1,
            ("encoder.position.offset", "decoder.position.offset"),
            lambda pad: None if pad is None else pad + 1,
            lambda offset: None if offset is None else offset - 1,
        ),
        *with_defaults(
            OPTIONS,
            {"vocab_size": 128112, "activation_function": "relu", "attention_dropout": 0.1}
            | {"encoder_layerdrop": 0.05, "decoder_layerdrop": 0.05, "scale_embedding": True},
        ),
    )
    required: ClassVar = {}
    ignored_options = ("bos_token_id", "chunk_size_feed_forward", "is_encoder_decoder", "use_cache")
    # sinusoids instead of tables of positions, and a norm at the end of each stack
    key_mapping: ClassVar = {
        **TABLES,
        **stack("encoder", 2, {"layer_norm": ".final_norm"}),
        **stack("decoder", 3, {"layer_norm": ".final_norm"}),
    }
    ignored_keys = ("*coder.embed_tokens.weight", "*coder.version", "*coder.embed_positions.*")
    head_dropouts = ()
    tasks: ClassVar = {
        "ForConditionalGeneration": Task(LanguageModelConfig(), LM_HEAD, tied_keys=TIED, unused_keys=SHARED),
        "Model": MODEL,
    }
    sizes = ("m2m100-418m", "m2m100-1.2b")


PEGASUS_ENDS = {"embed_positions": ".position.tables.0", "layernorm_embedding": ".final_norm"}
ENCODER_ATTENTION = {
    "self_attn.self.[query|key|value]": "attention.[query|key|value]",
    "self_attn.output": "attention.output",
}


@register
class BigBirdPegasus(BlockSparseFamily, Bart):
    """A summarizer of long texts."""

    model_type = "bigbird_pegasus"
    class_prefix = "BigBirdPegasus"
    paper = "Zaheer et al. 2020"
    objective = "sentences written from the rest of the text, then summaries"
    template = model_config("bigbird-pegasus-large")
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 96103, "max_position_embeddings": 4096, "activation_function": "gelu_new"}
            | {"encoder_layers": 16, "decoder_layers": 16, "scale_embedding": True}
            | {"pad_token_id": 0, "eos_token_id": 1},
            "activation_dropout",
        ),
        option("activation_dropout", 0.0, "decoder.feedforward.inner_dropout"),
        flag("use_bias", "encoder.attention.bias", "decoder.attention.bias"),
    )
    required: ClassVar = {}
    ignored_options = (
        *("bos_token_id", "chunk_size_feed_forward", "gradient_checkpointing"),
        *("is_decoder", "is_encoder_decoder", "use_cache"),
    )
    num_labels = 2
    key_mapping: ClassVar = {
        **TABLES,
        **stack("encoder", 2, PEGASUS_ENDS, ENCODER_ATTENTION),
        **stack("decoder", 3, PEGASUS_ENDS),
    }
    tasks: ClassVar = {
        **Bart.tasks,
        "ForSequenceClassification": dataclasses.replace(
            Bart.tasks["ForSequenceClassification"], config_mapping=(option("eos_token_id", 1, "end_token"),)
        ),
        "ForCausalLM": dataclasses.replace(
            Bart.tasks["ForCausalLM"],
            tied_keys={},
            trunk={"decoder.embed_tokens": "tokens", **stack("decoder", 2, PEGASUS_ENDS)},
        ),
    }
    sizes = ("bigbird-pegasus-large",)

    def fitted(self, config: ModelConfig, stored: Collection[str]) -> ModelConfig:
        """Return the configuration of an untied decoder: transformers never ties `ForCausalLM`."""
        if config.encoder is not None or "lm_head.weight" not in stored:
            return config
        embedding = dataclasses.replace(config.embedding, tied=False, shared=False)
        return dataclasses.replace(config, embedding=embedding)


SINUSOIDS = SinusoidalConfig(layout="halves")
WAVES = ("*coder.embed_tokens.weight", "*coder.version", "*coder.embed_positions.*")
PADDED = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


@register
class MBart(Bart):
    """BART in pre-norm order for many languages, with a norm at the end of each stack.

    Files of translators name their start token. transformers moves the last token of the labels, a language
    code, to the start of the decoder's inputs; here such inputs are passed as decoder_input_ids. Classes that
    label texts are refused, since they do so with the text.
    """

    model_type = "mbart"
    class_prefix = "MBart"
    paper = "Liu et al. 2020"
    objective = "denoising in 25 languages, then translation"
    template = model_config("bart-large").override("block", "pre")
    config_mapping = with_defaults(OPTIONS, {"decoder_start_token_id": None})
    required: ClassVar = {}
    ignored_options = (
        *("bos_token_id", "chunk_size_feed_forward", "forced_eos_token_id"),
        *("is_decoder", "is_encoder_decoder", "use_cache", "normalize_before", "normalize_embedding"),
        *(
            "add_bias_logits",
            "classifier_dropout",
            "add_final_layer_norm",
            "static_position_embeddings",
            "extra_pos_embeddings",
        ),
    )
    key_mapping: ClassVar = {
        **TABLES,
        **stack("encoder", 2, {**ENDS, "layer_norm": ".final_norm"}),
        **stack("decoder", 3, {**ENDS, "layer_norm": ".final_norm"}),
    }
    head_dropouts = ()
    tasks: ClassVar = {name: Bart.tasks[name] for name in ("ForConditionalGeneration", "Model")}
    sizes = ()


@register
class Marian(Bart):
    """A translator of one pair of languages with sinusoids and one vocabulary, as the models of OPUS-MT."""

    model_type = "marian"
    class_prefix = "Marian"
    paper = "Junczys-Dowmunt et al. 2018"
    objective = "translation"
    template = model_config("bart-large").override("position", SINUSOIDS).override("embedding.normed", False)
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 58101, "pad_token_id": 58100, "eos_token_id": 0, "decoder_start_token_id": 58100},
    )
    required: ClassVar = {
        "share_encoder_decoder_embeddings": True,
        **{"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False},
    }
    other_options: ClassVar = {"decoder_vocab_size": None}
    ignored_options = (*Bart.ignored_options, "static_position_embeddings", "extra_pos_embeddings")
    key_mapping: ClassVar = {**TABLES, **stack("encoder", 2, {}), **stack("decoder", 3, {})}
    ignored_keys = WAVES
    tasks: ClassVar = {"MTModel": Bart.tasks["ForConditionalGeneration"], "Model": MODEL}
    sizes = ()

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for another vocabulary of the decoder."""
        why = "; a decoder with a vocabulary of its own is not there"
        check_same("decoder_vocab_size", "vocab_size", hub, why)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the vocabulary of the decoder, which is the encoder's."""
        return {"decoder_vocab_size": tree["vocab_size"]}


@register
class Pegasus(Bart):
    """A summarizer: BART's layers in pre-norm order with sinusoids."""

    model_type = "pegasus"
    class_prefix = "Pegasus"
    paper = "Zhang et al. 2020"
    objective = "sentences written from the rest of the text, then summaries"
    template = Marian.template.override("block", "pre")
    config_mapping = with_defaults(OPTIONS, PADDED)
    required: ClassVar = {}
    ignored_options = (*MBart.ignored_options, "length_penalty", "num_beams", "max_length")
    key_mapping: ClassVar = {
        **TABLES,
        **stack("encoder", 2, {"layer_norm": ".final_norm"}),
        **stack("decoder", 3, {"layer_norm": ".final_norm"}),
    }
    ignored_keys = WAVES
    head_dropouts = ()
    tasks: ClassVar = {name: Bart.tasks[name] for name in ("ForConditionalGeneration", "Model")}
    sizes = ()


@register
class Blenderbot(Bart):
    """A partner in conversations: BART's layers in pre-norm order, with positions from the first row on."""

    model_type = "blenderbot"
    class_prefix = "Blenderbot"
    paper = "Roller et al. 2021"
    objective = "the next turn of a conversation"
    template = MBart.template.override("position", LearnedConfig()).override("embedding.normed", False)
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 8008, "d_model": 2560, "max_position_embeddings": 128, "decoder_start_token_id": 1}
        | {"encoder_layers": 2, "encoder_ffn_dim": 10240, "encoder_attention_heads": 32, "pad_token_id": 0}
        | {"decoder_layers": 24, "decoder_ffn_dim": 10240, "decoder_attention_heads": 32},
    )
    required: ClassVar = {}
    ignored_options = (*MBart.ignored_options, "encoder_no_repeat_ngram_size")
    key_mapping: ClassVar = {
        **TABLES,
        **stack("encoder", 2, {**POSITIONS, "layer_norm": ".final_norm"}),
        **stack("decoder", 3, {**POSITIONS, "layer_norm": ".final_norm"}),
    }
    head_dropouts = ()
    tasks: ClassVar = {name: Bart.tasks[name] for name in ("ForConditionalGeneration", "Model")}
    sizes = ()
