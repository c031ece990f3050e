"""ESM: encoders of proteins, whose tokens are amino acids.

ESM-1b: Rives et al. 2021; ESM-2: Lin et al. 2023. Layers are in pre-norm order, with rotary positions (ESM-2)
or learned ones after the padding id (ESM-1b), and with token dropout (nn/stack/embedding.py). The weights of
contacts, which read attention weights in another method, take no part in outputs and are kept as they are; so
are stored frequencies of rotations, which are computed here.
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.positions import LearnedConfig, RopeConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Option, Tree, get_path, with_defaults
from polyformer.models.checkpoints.families.bert import EMBEDDINGS, LAYER, OPTIONS
from polyformer.models.checkpoints.families.common import TOKEN_CLASSIFICATION, pooled
from polyformer.models.checkpoints.families.roberta import CLASSIFIER, EPS, POSITIONS
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, MaskedConfig
from polyformer.nn.stack import TokenDropoutConfig

UNUSED = ("{base}contact_head.*", "{base}*rotary_embeddings.inv_freq")


@register
class Esm(Family):
    """An encoder of a protein, in which masked amino acids are predicted."""

    model_type = "esm"
    class_prefix = "Esm"
    paper = "Lin et al. 2023"
    objective = "masked language modelling of proteins"
    base_model_prefix = "esm"
    template = (
        model_config("roberta-base")
        .override("block", "pre")
        .override("embedding.type_vocab_size", 0)
        .override("embedding.embedding_dropout", 0.0)
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": None, "pad_token_id": None, "eos_token_id": 2},
            *(POSITIONS, "type_vocab_size", "hidden_act"),
        ),
        Option("emb_layer_norm_before", None, ("embedding.normed",), bool),
    )
    required: ClassVar = {"is_decoder": False, "add_cross_attention": False, "is_folding_model": False}
    other_options: ClassVar = {
        **{POSITIONS: 1026, "position_embedding_type": "absolute", "rope_theta": 10000.0},
        "token_dropout": False,
    }
    ignored_options = ("use_cache", "esmfold_config", "vocab_list", "mask_token_id")
    key_mapping: ClassVar = {
        **{theirs: ours for theirs, ours in EMBEDDINGS.items() if "types" not in ours and "norm" not in ours},
        "embeddings.layer_norm": "encoder_embedding.norm",
        **layered(
            "encoder.layer.{i}",
            "encoder.layers.{i}",
            {theirs.replace("output.LayerNorm", "LayerNorm"): ours for theirs, ours in LAYER.items()},
        ),
        "encoder.emb_layer_norm_after": "encoder.final_norm",
    }
    ignored_keys = ("*embeddings.position_ids", "*embeddings.position_embeddings.weight")
    head_dropouts = ("hidden_dropout_prob",)
    tasks: ClassVar = {
        name: dataclasses.replace(task, unused_keys=UNUSED)
        for name, task in {
            "Model": pooled("{base}pooler.dense"),
            "ForMaskedLM": Task(
                MaskedConfig(),
                {
                    "lm_head.[dense|layer_norm|bias]": "head.[dense|norm|bias]",
                    "lm_head.decoder.weight": "head.weight",
                },
                (EPS,),
                {"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"},
            ),
            "ForSequenceClassification": Task(ClassifyConfig(drops_twice=True), CLASSIFIER),
            "ForTokenClassification": TOKEN_CLASSIFICATION,
        }.items()
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for other positions, and for missing ids of padding and of masks."""
        kind = hub["position_embedding_type"]
        if kind not in ("absolute", "rotary"):
            raise InputError(
                f"config.json: position_embedding_type is {quote(kind)}, expected 'absolute' or 'rotary'"
            )
        for name, needed in (("pad_token_id", kind == "absolute"), ("mask_token_id", hub["token_dropout"])):
            if needed and hub.get(name) is None:
                raise InputError(
                    f"config.json: {name} is missing, and {kind} positions or token_dropout need it"
                )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set positions, of which learned ones begin after the padding id, and token dropout."""
        learned = hub["position_embedding_type"] == "absolute"
        first = hub["pad_token_id"] + 1 if learned else 0
        position = LearnedConfig(offset=first) if learned else RopeConfig(base=hub["rope_theta"])
        tree["encoder"]["position"], tree[POSITIONS] = position.to_dict(), hub[POSITIONS] - first
        if hub["token_dropout"]:
            tree["embedding"]["token_dropout"] = TokenDropoutConfig(mask=hub["mask_token_id"]).to_dict()

    def write_other_options(self, tree: Tree) -> Tree:
        """Return positions and token dropout."""
        position, dropout = tree["encoder"]["position"], get_path(tree, "embedding.token_dropout")
        rotary = position["kind"] == "rope"
        hub = {
            "position_embedding_type": "rotary" if rotary else "absolute",
            POSITIONS: tree[POSITIONS] + position.get("offset", 0),
            "token_dropout": dropout is not None,
        }
        hub |= {"rope_theta": position["base"]} if rotary else {}
        return hub if dropout is None else {**hub, "mask_token_id": dropout["mask"]}
