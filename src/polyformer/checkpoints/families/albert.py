"""ALBERT: BERT with factorised embeddings, shared layers and sentence-order prediction. Lan et al. 2020.

Dropout comes behind the feed-forward too, as in the paper's own code, where transformers has none; the
published weights were trained without any.
"""

from typing import ClassVar

from polyformer.checkpoints.config_mapping import Tree, option, with_defaults
from polyformer.checkpoints.families.bert import (
    EMBEDDINGS,
    MASKED_OPTIONS,
    OPTIONS,
    PRETRAINING_OPTIONS,
    BertFamily,
)
from polyformer.checkpoints.families.shared_tasks import (
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    multiple_choice,
)
from polyformer.checkpoints.family import Task, register
from polyformer.checkpoints.key_mapping import layered
from polyformer.core.errors import InputError
from polyformer.heads import (
    ClassifyConfig,
    EmbedConfig,
    MaskedConfig,
    PretrainingConfig,
)
from polyformer.presets import model_config

LAYER = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.dense": "attention.output",
    "attention.LayerNorm": "block.norms.0",
    "ffn": "feedforward.up",
    "ffn_output": "feedforward.down",
    "full_layer_layer_norm": "block.norms.1",
}
OWN_DEFAULTS = {
    "vocab_size": 30000,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
MASKED = {
    "predictions.dense": "head.dense",
    "predictions.LayerNorm": "head.norm",
    "predictions.bias": "head.bias",
    "predictions.decoder": "head",
}
PRETRAINING = {
    **{name: ours.replace("head", "head.tokens", 1) for name, ours in MASKED.items()},
    "{base}pooler": "head.sentence.dense",
    "sop_classifier.classifier": "head.sentence.output",
}
POOLER = {"{base}pooler": "head.dense"}
COPIES = {
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}


@register
class Albert(BertFamily):
    """Runs of layers with the same weights; `num_hidden_groups` of them."""

    model_type = "albert"
    class_prefix = "Albert"
    paper = "Lan et al. 2020"
    objective = "masked language modelling of n-grams and sentence-order prediction"
    base_model_prefix = "albert"
    template = model_config("albert-base")
    config_mapping = (
        *with_defaults(OPTIONS, OWN_DEFAULTS),
        option("embedding_size", 128, "embedding.size"),
        option("num_hidden_groups", 1, "encoder.num_hidden_groups"),
    )
    required: ClassVar = {"inner_group_num": 1, "position_embedding_type": "absolute"}
    key_mapping: ClassVar = {
        **{f"embeddings.{theirs}": ours for theirs, ours in EMBEDDINGS.items()},
        "encoder.embedding_hidden_mapping_in": "encoder_embedding.widen",
        **layered("encoder.albert_layer_groups.{i}.albert_layers.0", "encoder.layers.{i}", LAYER),
    }
    head_dropouts = ("classifier_dropout_prob", "hidden_dropout_prob")
    tasks: ClassVar = {
        "Model": Task(EmbedConfig(pooling="first", hidden=True, normalize=False), POOLER, prefixed=False),
        "ForPreTraining": Task(
            PretrainingConfig(),
            PRETRAINING,
            (*PRETRAINING_OPTIONS, option("classifier_dropout_prob", 0.1, "sentence.dropout")),
            COPIES,
        ),
        "ForMaskedLM": Task(MaskedConfig(), MASKED, MASKED_OPTIONS, COPIES),
        "ForSequenceClassification": Task(ClassifyConfig(), {**POOLER, "classifier": "head.output"}),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": multiple_choice("{base}pooler"),
    }
    sizes = ("albert-base", "albert-large", "albert-xxlarge")

    def check(self, hub: Tree) -> None:
        """Refuses groups of layers that are not of one size, too."""
        super().check(hub)
        layers, groups = hub.get("num_hidden_layers", 12), hub.get("num_hidden_groups", 1)
        if not groups or layers % groups:  # transformers says which by dividing as floats
            raise InputError(
                f"config.json: num_hidden_groups is {groups}, expected a divisor of the {layers} layers"
            )
