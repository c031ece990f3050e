"""BERT: post-norm encoder, learned positions, token types. Devlin et al. 2019."""

from collections.abc import Mapping
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Option, Tree, activation, option
from polyformer.models.checkpoints.families.shared_tasks import (
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    multiple_choice,
)
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import (
    ClassifyConfig,
    EmbedConfig,
    LanguageModelConfig,
    MaskedConfig,
    PretrainingConfig,
    TransformConfig,
)

LAYER = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "block.norms.0",
    "intermediate.dense": "feedforward.up",
    "output.dense": "feedforward.down",
    "output.LayerNorm": "block.norms.1",
}
EMBEDDINGS = {
    "word_embeddings": "tokens",
    "position_embeddings": "encoder.position.tables.0",
    "token_type_embeddings": "encoder_embedding.types",
    "LayerNorm": "encoder_embedding.norm",
}
TRUNK = {
    **{f"embeddings.{theirs}": ours for theirs, ours in EMBEDDINGS.items()},
    **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
}

OPTIONS = (
    option("vocab_size", 30522, "vocab_size"),
    option("hidden_size", 768, "hidden_size"),
    option("max_position_embeddings", 512, "max_position_embeddings"),
    option("type_vocab_size", 2, "embedding.type_vocab_size"),
    option("num_hidden_layers", 12, "encoder.num_hidden_layers"),
    option("num_attention_heads", 12, "encoder.attention.num_attention_heads"),
    option("intermediate_size", 3072, "encoder.feedforward.intermediate_size"),
    activation("hidden_act", "gelu", "encoder.feedforward.activation"),
    option("hidden_dropout_prob", 0.1, "encoder.dropout"),
    option("attention_probs_dropout_prob", 0.1, "encoder.attention.mechanism.dropout"),
    option("layer_norm_eps", 1e-12, "encoder.norm.eps"),
    option("initializer_range", 0.02, "initializer_range"),
    option("pad_token_id", 0, "special.pad"),
    option("bos_token_id", None, "special.bos"),
    option("eos_token_id", None, "special.eos"),
    option("tie_word_embeddings", True, "embedding.tied"),
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
MASKED_OPTIONS = (activation("hidden_act", "gelu", "activation"), option("layer_norm_eps", 1e-12, "eps"))
PRETRAINING_OPTIONS = (
    activation("hidden_act", "gelu", "tokens.activation"),
    option("layer_norm_eps", 1e-12, "tokens.eps"),
)
PRETRAINING = {
    **{name: ours.replace("head", "head.tokens", 1) for name, ours in MASKED.items()},
    "{base}pooler.dense": "head.sentence.dense",
    "cls.seq_relationship": "head.sentence.output",
}


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
    head = LanguageModelConfig(bias=True, transform=TransformConfig(dense_bias=True, norm_bias=True))
    eps = option("layer_norm_eps", 1e-12, "transform.eps")
    return Task(
        head,
        keys,
        (*options, eps),
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
        if hub.get("type_vocab_size", 2) < 1:
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
        "Model": Task(EmbedConfig(pooling="first", hidden=True, normalize=False), POOLER, prefixed=False),
        "ForPreTraining": Task(
            PretrainingConfig(sentence=ClassifyConfig(dropout=0.0)), PRETRAINING, PRETRAINING_OPTIONS, COPIES
        ),
        "ForMaskedLM": Task(MaskedConfig(), MASKED, MASKED_OPTIONS, COPIES),
        "LMHeadModel": as_decoder(
            MASKED,
            TRANSFORM,
            COPIES,
            activation("hidden_act", "gelu", "transform.activation"),
        ),
        "ForSequenceClassification": Task(ClassifyConfig(), {**POOLER, "classifier": "head.output"}),
        "ForNextSentencePrediction": Task(
            ClassifyConfig(dropout=0.0), {**POOLER, "cls.seq_relationship": "head.output"}, labelled=False
        ),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": multiple_choice("{base}pooler.dense"),
    }
    sizes = ("bert-base", "bert-large")
