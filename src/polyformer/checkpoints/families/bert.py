"""BERT: post-norm encoder, learned positions, token types. Devlin et al. 2019."""

from typing import ClassVar

from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, act, field
from polyformer.checkpoints.names import layered
from polyformer.core.errors import InputError
from polyformer.heads import (
    ClassifyConfig,
    EmbedConfig,
    MaskedConfig,
    PretrainingConfig,
    SpanConfig,
    TagConfig,
)
from polyformer.presets import model_config

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

FIELDS = (
    field("vocab_size", 30522, "vocab_size"),
    field("hidden_size", 768, "hidden_size"),
    field("max_position_embeddings", 512, "max_position_embeddings"),
    field("type_vocab_size", 2, "embedding.type_vocab_size"),
    field("num_hidden_layers", 12, "encoder.num_hidden_layers"),
    field("num_attention_heads", 12, "encoder.attention.num_attention_heads"),
    field("intermediate_size", 3072, "encoder.feedforward.intermediate_size"),
    act("hidden_act", "gelu", "encoder.feedforward.activation"),
    field("hidden_dropout_prob", 0.1, "encoder.dropout"),
    field("attention_probs_dropout_prob", 0.1, "encoder.attention.mechanism.dropout"),
    field("layer_norm_eps", 1e-12, "encoder.norm.eps"),
    field("initializer_range", 0.02, "initializer_range"),
    field("pad_token_id", 0, "special.pad"),
    field("bos_token_id", None, "special.bos"),
    field("eos_token_id", None, "special.eos"),
    field("tie_word_embeddings", True, "embedding.tied"),
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
MASKED_FIELDS = (act("hidden_act", "gelu", "activation"), field("layer_norm_eps", 1e-12, "eps"))
PRETRAINING_FIELDS = (
    act("hidden_act", "gelu", "tokens.activation"),
    field("layer_norm_eps", 1e-12, "tokens.eps"),
)
PRETRAINING = {
    **{name: ours.replace("head", "head.tokens", 1) for name, ours in MASKED.items()},
    "{base}pooler.dense": "head.sentence.dense",
    "cls.seq_relationship": "head.sentence.output",
}


def check_types(hub: Tree) -> None:
    """Raises `InputError` without token types, which transformers adds to every token."""
    if hub.get("type_vocab_size", 2) < 1:
        raise InputError("config.json: type_vocab_size is 0, expected 1 or more")


@register
class Bert(Family):
    """The first of the tree."""

    model_type = "bert"
    classes = "Bert"
    paper = "Devlin et al. 2019"
    objective = "masked language modelling and next sentence prediction"
    base = "bert"
    template = model_config("bert-base")
    fields = FIELDS
    fixed: ClassVar = {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }
    inert = ("use_cache",)
    names = TRUNK
    ignored = ("*embeddings.position_ids",)
    dropouts = ("classifier_dropout", "hidden_dropout_prob")
    tasks: ClassVar = {
        "Model": Task(EmbedConfig(pooling="first", hidden=True, normalize=False), POOLER, base=False),
        "ForPreTraining": Task(
            PretrainingConfig(sentence=ClassifyConfig(dropout=0.0)), PRETRAINING, PRETRAINING_FIELDS, COPIES
        ),
        "ForMaskedLM": Task(MaskedConfig(), MASKED, MASKED_FIELDS, COPIES),
        "ForSequenceClassification": Task(ClassifyConfig(), {**POOLER, "classifier": "head.output"}),
        "ForNextSentencePrediction": Task(
            ClassifyConfig(dropout=0.0), {**POOLER, "cls.seq_relationship": "head.output"}, labelled=False
        ),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}),
        "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}),
    }
    sizes = ("bert-base", "bert-large")

    def check(self, hub: Tree) -> None:
        check_types(hub)
