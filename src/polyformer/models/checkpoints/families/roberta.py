"""RoBERTa: BERT's model with positions that begin after the padding id, and separate heads. Liu et al. 2019.

transformers counts positions over the ids that are not padding, and we over the tokens that are real: pass
the attention_mask if there is padding, and both are equal. `position_ids` count from 0 here, and from the
padding id + 1 in transformers.
"""

from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Tree, option, with_defaults
from polyformer.models.checkpoints.families.bert import OPTIONS, POOLER, TRUNK, BertFamily, as_decoder
from polyformer.models.checkpoints.families.shared_tasks import (
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    as_pooled,
)
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, EmbedConfig, MaskedConfig

OWN_DEFAULTS = {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


LM_HEAD = {
    "lm_head.dense": "head.dense",
    "lm_head.layer_norm": "head.norm",
    "lm_head.bias": "head.bias",
    "lm_head.decoder": "head",
}
CLASSIFIER = {"classifier.dense": "head.dense", "classifier.out_proj": "head.output"}


def tied_keys(prefix: str) -> dict[str, str]:
    """Return the masked head's names of the token table, with the prefix `prefix`, and of its bias."""
    return {
        "lm_head.decoder.weight": f"{prefix}.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


@register
class Roberta(BertFamily):
    """An encoder like BERT without its second objective, trained on ten times the text."""

    model_type = "roberta"
    class_prefix = "Roberta"
    paper = "Liu et al. 2019"
    objective = "masked language modelling with dynamic masking"
    base_model_prefix = "roberta"
    template = model_config("roberta-base")
    config_mapping = with_defaults(OPTIONS, OWN_DEFAULTS, "max_position_embeddings")
    other_options = ("max_position_embeddings",)
    key_mapping = TRUNK
    tasks: ClassVar = {
        "Model": Task(EmbedConfig(pooling="first", hidden=True, normalize=False), POOLER, prefixed=False),
        "ForMaskedLM": Task(
            MaskedConfig(), LM_HEAD, (option("layer_norm_eps", 1e-12, "eps"),), tied_keys("roberta")
        ),
        "ForCausalLM": as_decoder(LM_HEAD, ("lm_head.dense", "lm_head.layer_norm"), tied_keys("roberta")),
        "ForSequenceClassification": Task(ClassifyConfig(drops_twice=True), CLASSIFIER),
        "ForTokenClassification": TOKEN_CLASSIFICATION,
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "ForMultipleChoice": as_pooled("{base}pooler.dense"),
    }
    sizes = ("roberta-base", "roberta-large")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for models without a padding id, after which positions begin."""
        super().check(hub)
        if hub.get("pad_token_id", 1) is None:
            raise InputError("config.json: pad_token_id is None, and positions begin behind it; set it to 1")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the row of the first position to pad + 1 of the table."""
        pad, rows = hub.get("pad_token_id", 1), hub.get("max_position_embeddings", 512)
        tree["encoder"]["position"]["offset"] = pad + 1
        tree["max_position_embeddings"] = rows - pad - 1

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the number of rows of the table: positions and the rows before them."""
        offset = tree["encoder"]["position"].get("offset", 0)
        return {"max_position_embeddings": tree["max_position_embeddings"] + offset}
