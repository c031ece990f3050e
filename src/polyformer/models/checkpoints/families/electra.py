"""ELECTRA: a discriminator that detects replaced tokens, and their generator. Clark et al. 2020.

Both load with any head: the discriminator's is "ForPreTraining", the generator's "ForMaskedLM".
"""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import (
    Tree,
    activation,
    check_required,
    option,
    with_defaults,
)
from polyformer.models.checkpoints.families.bert import OPTIONS, TRUNK, BertFamily
from polyformer.models.checkpoints.families.common import (
    FIRST_TOKEN,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    multiple_choice,
)
from polyformer.models.checkpoints.families.roberta import CLASSIFIER, EPS
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, DetectConfig, MaskedConfig

GENERATOR = {
    "generator_predictions.[dense|LayerNorm]": "head.[dense|norm]",
    "generator_lm_head": "head",
}
DISCRIMINATOR = {"discriminator_predictions.[dense|dense_prediction]": "head.[dense|output]"}
# The supported options of multiple choice.
SUMMARY = {"summary_type": "first", "summary_use_proj": True}

COPIES = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}


@register
class Electra(BertFamily):
    """An encoder with a matrix that widens the embedding sum if it is narrower than the layers."""

    model_type = "electra"
    class_prefix = "Electra"
    paper = "Clark et al. 2020"
    objective = "replaced-token detection, with a jointly trained generator"
    base_model_prefix = "electra"
    template = model_config("electra-small")
    config_mapping = with_defaults(
        OPTIONS, {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    )
    other_options: ClassVar = {"embedding_size": 128}
    ignored_options = ("use_cache", *SUMMARY)
    key_mapping: ClassVar = {**TRUNK, "embeddings_project": "encoder_embedding.widen"}
    tasks: ClassVar = {
        "ForPreTraining": Task(
            DetectConfig(), DISCRIMINATOR, (activation("hidden_act", "gelu", "activation"),)
        ),
        "ForMaskedLM": Task(MaskedConfig(), GENERATOR, (EPS,), COPIES),
        "Model": FIRST_TOKEN,
        "ForSequenceClassification": Task(ClassifyConfig(activation="gelu", drops_twice=True), CLASSIFIER),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": multiple_choice(
            "sequence_summary.summary",
            None,
            activation("summary_activation", "gelu", "text.activation"),
            option("summary_last_dropout", 0.1, "text.dropout"),
            labelled=False,
        ),
    }
    sizes = ("electra-small", "electra-base", "electra-large", "electra-base-generator")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the width of the embeddings if it differs; refuse other layers of a choice."""
        if tree["head"]["kind"] == "choose":
            check_required(SUMMARY, hub)
        # There is no matrix if both widths are equal.
        size = hub["embedding_size"]
        tree["embedding"]["size"] = None if size == tree["hidden_size"] else size

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the width of the embeddings."""
        return {"embedding_size": tree["embedding"]["size"] or tree["hidden_size"]}
