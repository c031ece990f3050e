"""ELECTRA: a discriminator that finds replaced tokens, and the generator of these. Clark et al. 2020.

Either loads with any head: the discriminator's is "ForPreTraining", the generator's "ForMaskedLM".
"""

from typing import ClassVar

from polyformer.checkpoints.families.bert import EMBEDDINGS, FIELDS, LAYER, check_types
from polyformer.checkpoints.families.roberta import CLASSIFIER, changed
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, act, field
from polyformer.checkpoints.names import layered
from polyformer.heads import ClassifyConfig, DetectConfig, EmbedConfig, MaskedConfig, SpanConfig, TagConfig
from polyformer.presets import model_config

GENERATOR = {
    "generator_predictions.dense": "head.dense",
    "generator_predictions.LayerNorm": "head.norm",
    "generator_lm_head": "head",
}
DISCRIMINATOR = {
    "discriminator_predictions.dense": "head.dense",
    "discriminator_predictions.dense_prediction": "head.output",
}
COPIES = {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"}


@register
class Electra(Family):
    """A matrix widens the embedding sum where that is narrower than the layers, and only there."""

    model_type = "electra"
    classes = "Electra"
    paper = "Clark et al. 2020"
    objective = "replaced-token detection, with a generator trained beside it"
    base = "electra"
    template = model_config("electra-small")
    fields = changed(FIELDS, {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024})
    adjusted = ("embedding_size",)
    fixed: ClassVar = {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }
    # the summary is of multiple choice alone
    inert = (
        "use_cache",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_last_dropout",
    )
    names: ClassVar = {
        **{f"embeddings.{theirs}": ours for theirs, ours in EMBEDDINGS.items()},
        "embeddings_project": "encoder_embedding.widen",
        **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
    }
    ignored = ("*embeddings.position_ids",)
    dropouts = ("classifier_dropout", "hidden_dropout_prob")
    tasks: ClassVar = {
        "ForPreTraining": Task(DetectConfig(), DISCRIMINATOR, (act("hidden_act", "gelu", "activation"),)),
        "ForMaskedLM": Task(MaskedConfig(), GENERATOR, (field("layer_norm_eps", 1e-12, "eps"),), COPIES),
        "Model": Task(EmbedConfig(pooling="first", normalize=False), base=False),
        "ForSequenceClassification": Task(ClassifyConfig(activation="gelu", drops_twice=True), CLASSIFIER),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}),
        "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}),
    }
    sizes = ("electra-small", "electra-base", "electra-large", "electra-base-generator")

    def check(self, hub: Tree) -> None:
        check_types(hub)

    def adjust(self, tree: Tree, hub: Tree) -> None:
        size = hub.get("embedding_size", 128)
        tree["embedding"]["size"] = None if size == tree["hidden_size"] else size

    def describe(self, tree: Tree) -> Tree:
        return {"embedding_size": tree["embedding"]["size"] or tree["hidden_size"]}
