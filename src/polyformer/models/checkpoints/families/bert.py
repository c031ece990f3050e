"""BERT: post-norm encoder, learned positions, token types. Devlin et al. 2019.

DistilBERT: half of BERT's layers, distilled from BERT; no token types, no pooler. Sanh et al. 2019.

Megatron-BERT: BERT in pre-norm order. Shoeybi et al. 2019.

With rotary positions and SwiGLU: nomic-embed-text, Nussbaum et al. 2024; EuroBERT, Boizard et al. 2025.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from polyformer.attention.positions import RopeConfig
from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import (
    ROPE_OPTIONS,
    Option,
    Tree,
    activation,
    flag,
    get_path,
    option,
    read_rope,
    with_defaults,
    write_rope,
)
from polyformer.models.checkpoints.families.common import (
    FIRST_TOKEN,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    as_pooled,
    multiple_choice,
    pooled,
)
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Fused, layered
from polyformer.models.checkpoints.values import options, special
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import GatedConfig
from polyformer.nn.heads import (
    ClassifyConfig,
    LanguageModelConfig,
    MaskedConfig,
    PretrainingConfig,
    SpanConfig,
    TagConfig,
    TransformConfig,
)
from polyformer.nn.stack import EmbeddingConfig

LAYER = {
    "attention.self.[query|key|value]": "attention.[query|key|value]",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "block.norms.0",
    "intermediate.dense": "feedforward.up",
    "output.dense": "feedforward.down",
    "output.LayerNorm": "block.norms.1",
}
EMBEDDINGS = {
    "embeddings.word_embeddings": "tokens",
    "embeddings.position_embeddings": "encoder.position.tables.0",
    "embeddings.token_type_embeddings": "encoder_embedding.types",
    "embeddings.LayerNorm": "encoder_embedding.norm",
}
TRUNK = {**EMBEDDINGS, **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER)}

OPTIONS = options(
    "encoder",
    {"vocab_size": 30522, "hidden_size": 768, "max_position_embeddings": 512, "type_vocab_size": 2},
    {"num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu"},
    {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "layer_norm_eps": 1e-12},
    {"initializer_range": 0.02, **special(pad=0)},
)

MASKED = {
    "cls.predictions.transform.dense": "head.dense",
    "cls.predictions.transform.LayerNorm": "head.norm",
    "cls.predictions.bias": "head.bias",
    "cls.predictions.decoder": "head",
}
POOLER = {"{base}pooler.dense": "head.dense"}
COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
TRANSFORM = ("cls.predictions.transform",)
PRETRAINING = {
    **{name: ours.replace("head", "head.tokens", 1) for name, ours in MASKED.items()},
    "{base}pooler.dense": "head.sentence.dense",
    "cls.seq_relationship": "head.sentence.output",
}
NEXT_SENTENCE = PretrainingConfig(sentence=ClassifyConfig(dropout=0.0))


def transform_options(act: str = "gelu", place: str = "", eps: float = 1e-12) -> tuple[Option, Option]:
    """Return the options of the layer before the vocabulary, which is at `place` in our head."""
    return activation("hidden_act", act, f"{place}activation"), option("layer_norm_eps", eps, f"{place}eps")


def as_decoder(
    masked: Mapping[str, str],
    layer: tuple[str, ...],
    tied_keys: Mapping[str, str],
    *options: Option,
    unused_keys: tuple[str, ...] = (),
    required: Tree | None = None,
) -> Task:
    """Return the task of the class that is a decoder, with the tensors of the masked head.

    layer: the prefixes of the tensors that belong to the layer before the vocabulary. required: options with
    one supported value, in addition to `is_decoder`.
    """
    keys = {
        name: ours.replace("head.", "head.layer.") if name.startswith(layer) else ours
        for name, ours in masked.items()
    }
    return Task(
        LanguageModelConfig(bias=True, transform=TransformConfig(dense_bias=True, norm_bias=True)),
        keys,
        options,
        tied_keys,
        unused_keys=unused_keys,
        required={"is_decoder": True, **(required or {})},
        causal=True,
    )


class BertFamily(Family):
    """The common tables of BERT and its descendants."""

    required: ClassVar = {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }
    ignored_options = ("use_cache",)
    ignored_keys = ("*embeddings.position_ids",)
    head_dropouts = ("classifier_dropout", "hidden_dropout_prob")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for models without token types, which transformers adds to every token."""
        if hub["type_vocab_size"] < 1:
            raise InputError("config.json: type_vocab_size is 0, expected 1 or more")


@register
class Bert(BertFamily):
    """An encoder with a class for each head."""

    model_type = "bert"
    class_prefix = "Bert"
    paper = "Devlin et al. 2019"
    objective = "masked language modelling and next sentence prediction"
    base_model_prefix = "bert"
    template = model_config("bert-base")
    config_mapping = OPTIONS
    key_mapping = TRUNK
    tasks: ClassVar = {
        "Model": pooled("{base}pooler.dense"),
        "ForPreTraining": Task(NEXT_SENTENCE, PRETRAINING, transform_options(place="tokens."), COPIES),
        "ForMaskedLM": Task(MaskedConfig(), MASKED, transform_options(), COPIES),
        "LMHeadModel": as_decoder(MASKED, TRANSFORM, COPIES, *transform_options(place="transform.")),
        "ForSequenceClassification": Task(ClassifyConfig(), {**POOLER, "classifier": "head.output"}),
        # two labels without a name or an option: is next, is random
        "ForNextSentencePrediction": Task(
            ClassifyConfig(dropout=0.0), {**POOLER, "cls.seq_relationship": "head.output"}, labelled=False
        ),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": multiple_choice("{base}pooler.dense"),
    }
    sizes = ("bert-base", "bert-large")


@register
class MegatronBert(BertFamily):
    """BERT in pre-norm order, with a norm at the end of the encoder and none of the embeddings."""

    model_type = "megatron-bert"
    class_prefix = "MegatronBert"
    paper = "Shoeybi et al. 2019"
    objective = "masked language modelling and sentence order"
    base_model_prefix = "bert"
    template = model_config("bert-base").override("block", "pre").override("embedding.normed", False)
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 29056, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096},
    )
    key_mapping: ClassVar = {
        **{name: ours for name, ours in TRUNK.items() if "LayerNorm" not in name},
        **layered(
            "encoder.layer.{i}",
            "encoder.layers.{i}",
            {"attention.ln": "block.norms.0", "ln": "block.norms.1"},
        ),
        "encoder.ln": "encoder.final_norm",
    }
    head_dropouts = ("hidden_dropout_prob",)
    tasks: ClassVar = {
        **{
            name: task
            for name, task in Bert.tasks.items()
            if name not in ("LMHeadModel", "ForMultipleChoice")
        },
        "ForCausalLM": Bert.tasks["LMHeadModel"],
        "ForMultipleChoice": as_pooled("{base}pooler.dense"),
    }


@register
class DistilBert(Family):
    """An encoder with half of BERT's layers; the epsilon of its norms, 1e-12, is not an option."""

    model_type = "distilbert"
    class_prefix = "DistilBert"
    paper = "Sanh et al. 2019"
    objective = "distillation of a teacher's predictions and hidden states, and masked language modelling"
    base_model_prefix = "distilbert"
    template = model_config("distilbert-base")
    config_mapping = options(
        "encoder",
        {"vocab_size": 30522, "dim": 768, "max_position_embeddings": 512, "n_layers": 6, "n_heads": 12},
        {"hidden_dim": 3072, "activation": "gelu", "dropout": 0.1, "attention_dropout": 0.1},
        {"initializer_range": 0.02, **special(pad=0)},
    )
    # an initialization, which is in the file, and the dropouts of other heads
    ignored_options = ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout")
    key_mapping: ClassVar = {
        **{theirs: ours for theirs, ours in EMBEDDINGS.items() if "types" not in ours},
        **layered(
            "transformer.layer.{i}",
            "encoder.layers.{i}",
            {
                "attention.[q|k|v|out]_lin": "attention.[query|key|value|output]",
                "ffn.lin[1|2]": "feedforward.[up|down]",
                "[sa|output]_layer_norm": "block.norms.[0|1]",
            },
        ),
    }
    ignored_keys = ("*embeddings.position_ids",)
    tasks: ClassVar = {
        "Model": FIRST_TOKEN,
        "ForMaskedLM": Task(
            MaskedConfig(),
            {"vocab_[transform|layer_norm]": "head.[dense|norm]", "vocab_projector": "head"},
            (activation("activation", "gelu", "activation"),),
            {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(activation="relu"),
            {"pre_classifier": "head.dense", "classifier": "head.output"},
            (option("seq_classif_dropout", 0.2, "dropout"),),
        ),
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (option("dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, (option("qa_dropout", 0.1, "span_dropout"),)
        ),
        "ForMultipleChoice": multiple_choice(
            "pre_classifier",
            ClassifyConfig(num_labels=1, activation="relu"),
            option("seq_classif_dropout", 0.2, "text.dropout"),
        ),
    }
    sizes = ("distilbert-base",)


class RotaryEncoder(Family):
    """The base class of encoders with rotary positions."""

    other_options: ClassVar = {"head_dim": None, **ROPE_OPTIONS}

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the head dimension, and rotary positions."""
        tree["encoder"]["attention"]["head_size"] = hub["head_dim"]
        tree["encoder"]["position"] |= read_rope(hub)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the head dimension, and rotary positions."""
        size = get_path(tree, "encoder.attention.head_size")
        hub = write_rope(get_path(tree, "encoder.position") or {})
        return hub if size is None else {**hub, "head_dim": size}


@register
class NomicBert(RotaryEncoder):
    """A BERT with rotary positions and SwiGLU, without biases in layers: nomic-embed-text.

    Files have names of their authors' code, which transformers converts; options have transformers' names.
    """

    model_type = "nomic_bert"
    class_prefix = "NomicBert"
    paper = "Nussbaum et al. 2024"
    objective = "masked language modelling, then pairs of texts"
    base_model_prefix = "nomic_bert"
    template = (
        dataclasses.replace(model_config("bert-base"), head=MaskedConfig(activation="silu"))
        .override("position", RopeConfig(base=1000.0))
        .override("encoder.attention.bias", False)
        .override("encoder.feedforward", GatedConfig())
    )
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 30528, "max_position_embeddings": 2048, "hidden_act": "silu"}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    other_options: ClassVar = {**RotaryEncoder.other_options, "rope_theta": 1000.0}
    key_mapping: ClassVar = {
        **{theirs: ours for theirs, ours in EMBEDDINGS.items() if theirs[11:16] in ("word_", "token")},
        "emb_ln": "encoder_embedding.norm",
        **layered(
            "encoder.layers.{i}",
            "encoder.layers.{i}",
            {
                "attn.Wqkv": Fused(("attention.query", "attention.key", "attention.value")),
                "attn.out_proj": "attention.output",
                "mlp.[fc11|fc12|fc2]": "feedforward.[up|gate|down]",
                "norm[1|2]": "block.norms.[0|1]",
            },
        ),
    }
    head_dropouts = ("classifier_dropout", "hidden_dropout_prob")
    tasks: ClassVar = {
        "Model": FIRST_TOKEN,
        "ForMaskedLM": Task(
            MaskedConfig(),
            {name.replace("LayerNorm", "layer_norm"): ours for name, ours in MASKED.items()},
            transform_options("silu"),
            {name: copy.replace("bert.", "nomic_bert.") for name, copy in COPIES.items()},
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(dropout=0.0), {**POOLER, "classifier": "head.output"}
        ),
        "ForTokenClassification": Task(TagConfig(dropout=0.0), {"classifier": "head.output"}),
    }


@register
class EuroBert(RotaryEncoder):
    """An encoder of Llama's layers for the languages of Europe.

    Its masked head has no layer before the vocabulary, and its classifier averages scores of tokens: both are
    refused.
    """

    model_type = "eurobert"
    class_prefix = "EuroBert"
    paper = "Boizard et al. 2025"
    objective = "masked language modelling in 15 languages"
    base_model_prefix = "model"
    template = dataclasses.replace(
        model_config("bert-base"),
        encoder=model_config("llama-2-7b").decoder,
        embedding=EmbeddingConfig(tied=False),
        head=FIRST_TOKEN.head,
    )
    config_mapping = (
        *options(
            "encoder",
            {"vocab_size": 128256, "hidden_size": 768, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
            {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": None},
            {"intermediate_size": 3072, "hidden_act": "silu", "attention_dropout": 0.0},
            {"initializer_range": 0.02, **special(128001, 128000, 128001, tied=False)},
        ),
        flag("attention_bias", "encoder.attention.bias"),
        flag("mlp_bias", "encoder.feedforward.bias"),
    )
    ignored_options = ("use_cache", "pretraining_tp", "mask_token_id", "classifier_pooling")
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        **layered(
            "layers.{i}",
            "encoder.layers.{i}",
            {
                "self_attn.[q|k|v|o]_proj": "attention.[query|key|value|output]",
                "mlp.[gate|up|down]_proj": "feedforward.[gate|up|down]",
                "[input|post_attention]_layernorm": "block.norms.[0|1]",
            },
        ),
        "norm": "encoder.final_norm",
    }
    tasks: ClassVar = {
        "Model": FIRST_TOKEN,
        "ForTokenClassification": Task(TagConfig(dropout=0.0), {"classifier": "head.output"}),
    }
