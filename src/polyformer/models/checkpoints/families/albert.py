"""ALBERT: BERT with factorised embeddings, shared layers and sentence-order prediction. Lan et al. 2020.

Dropout also follows the feed-forward layer, as in the paper's own code, while transformers has none; the
published weights were trained without dropout.
"""

from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Tree, option, with_defaults
from polyformer.models.checkpoints.families.bert import EMBEDDINGS, OPTIONS, BertFamily, transform_options
from polyformer.models.checkpoints.families.common import (
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    multiple_choice,
    pooled,
)
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, MaskedConfig, PretrainingConfig

LAYER = {
    "attention.[query|key|value|dense]": "attention.[query|key|value|output]",
    "attention.LayerNorm": "block.norms.0",
    "[ffn|ffn_output]": "feedforward.[up|down]",
    "full_layer_layer_norm": "block.norms.1",
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
COPIES = {
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}


@register
class Albert(BertFamily):
    """An encoder with `num_hidden_groups` groups of `inner_group_num` layers; each group is repeated.

    `num_hidden_layers` is the total number of group runs.
    """

    model_type = "albert"
    class_prefix = "Albert"
    paper = "Lan et al. 2020"
    objective = "masked language modelling of n-grams and sentence-order prediction"
    base_model_prefix = "albert"
    template = model_config("albert-base")
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 30000, "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384}
            | {"hidden_act": "gelu_new", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            | {"bos_token_id": 2, "eos_token_id": 3},
            "num_hidden_layers",
        ),
        option("embedding_size", 128, "embedding.size"),
        option("num_hidden_groups", 1, "encoder.num_hidden_groups"),
        option("inner_group_num", 1, "encoder.layers_per_group"),
    )
    other_options: ClassVar = {"num_hidden_layers": 12}
    required: ClassVar = {"position_embedding_type": "absolute"}
    key_mapping: ClassVar = {
        **EMBEDDINGS,
        "encoder.embedding_hidden_mapping_in": "encoder_embedding.widen",
        **layered("encoder.albert_layer_groups.{i}.albert_layers.{j}", "encoder.layers.{i}", LAYER),
    }
    head_dropouts = ("classifier_dropout_prob", "hidden_dropout_prob")
    tasks: ClassVar = {
        "Model": pooled("{base}pooler"),
        "ForPreTraining": Task(
            PretrainingConfig(),
            PRETRAINING,
            (
                *transform_options("gelu_new", "tokens."),
                option("classifier_dropout_prob", 0.1, "sentence.dropout"),
            ),
            COPIES,
        ),
        "ForMaskedLM": Task(MaskedConfig(), MASKED, transform_options("gelu_new"), COPIES),
        "ForSequenceClassification": Task(
            ClassifyConfig(), {"{base}pooler": "head.dense", "classifier": "head.output"}
        ),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": multiple_choice("{base}pooler"),
    }
    sizes = ("albert-base", "albert-large", "albert-xxlarge")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for groups of layers of different sizes."""
        super().check(hub)
        layers, groups = hub["num_hidden_layers"], hub["num_hidden_groups"]
        if not groups or layers % groups:  # transformers selects the group by a float division
            raise InputError(
                f"config.json: num_hidden_groups is {groups}, expected a divisor of the {layers} layers"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the number of layers that run."""
        tree["encoder"]["num_hidden_layers"] = hub["num_hidden_layers"] * hub["inner_group_num"]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the number of group runs."""
        stack = tree["encoder"]
        return {"num_hidden_layers": stack["num_hidden_layers"] // stack["layers_per_group"]}

    def group_size(self, config: ModelConfig) -> int:
        """Return the number of layers of a group."""
        assert config.encoder is not None
        return config.encoder.layers_per_group
