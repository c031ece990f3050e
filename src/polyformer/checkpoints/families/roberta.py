"""RoBERTa: BERT's model, whose positions begin behind padding's id, with heads of its own. Liu et al. 2019.

transformers counts positions over the ids that are not padding's, and we over the tokens that are real: give
the attention_mask where there is padding, and the two are the same. Given `position_ids` count from 0 here,
and there from behind padding's id.
"""

from typing import ClassVar

from polyformer.checkpoints.families.bert import FIELDS, POOLER, TRUNK, check_types
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Field, Tree, field
from polyformer.core.errors import InputError
from polyformer.heads import ClassifyConfig, EmbedConfig, MaskedConfig, SpanConfig, TagConfig
from polyformer.presets import model_config

OWN_DEFAULTS = {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def changed(fields: tuple[Field, ...], defaults: Tree, *without: str) -> tuple[Field, ...]:
    """A parent's fields with other defaults, without some of them."""
    return tuple(
        Field(one.theirs, defaults.get(one.theirs, one.default), one.ours, one.read, one.write)
        for one in fields
        if one.theirs not in without
    )


LM_HEAD = {
    "lm_head.dense": "head.dense",
    "lm_head.layer_norm": "head.norm",
    "lm_head.bias": "head.bias",
    "lm_head.decoder": "head",
}
LM_COPIES = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
CLASSIFIER = {"classifier.dense": "head.dense", "classifier.out_proj": "head.output"}


@register
class Roberta(Family):
    """BERT without its second objective, on ten times the text."""

    model_type = "roberta"
    classes = "Roberta"
    paper = "Liu et al. 2019"
    objective = "masked language modelling, masked anew in every epoch"
    base = "roberta"
    template = model_config("roberta-base")
    fields = changed(FIELDS, OWN_DEFAULTS, "max_position_embeddings")
    adjusted = ("max_position_embeddings",)
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
        "ForMaskedLM": Task(MaskedConfig(), LM_HEAD, (field("layer_norm_eps", 1e-12, "eps"),), LM_COPIES),
        "ForSequenceClassification": Task(ClassifyConfig(drops_twice=True), CLASSIFIER),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}),
        "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}),
    }
    sizes = ("roberta-base", "roberta-large")

    def check(self, hub: Tree) -> None:
        check_types(hub)
        if hub.get("pad_token_id", 1) is None:
            raise InputError("config.json: pad_token_id is None, and positions begin behind it; set it to 1")

    def adjust(self, tree: Tree, hub: Tree) -> None:
        pad, rows = hub.get("pad_token_id", 1), hub.get("max_position_embeddings", 512)
        tree["encoder"]["position"]["offset"] = pad + 1
        tree["max_position_embeddings"] = rows - pad - 1

    def describe(self, tree: Tree) -> Tree:
        offset = tree["encoder"]["position"].get("offset", 0)
        return {"max_position_embeddings": tree["max_position_embeddings"] + offset}
