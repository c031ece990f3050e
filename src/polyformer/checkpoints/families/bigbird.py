"""BigBird: BERT's layers over blocks of a window, first, last and random blocks. Zaheer et al. 2020.

transformers draws random blocks in training alone. In evaluation it reads the first block in their place,
as often as there are random blocks, though that block is seen already; here random blocks are drawn in both,
and no key counts twice. So numbers are the same for full attention and for texts that are seen whole; those
of long texts are where both have the same random blocks, and the text is unpadded and a whole number of
blocks: its blocks are those of the padded row, ours those of each text.
"""

import dataclasses
import re
from typing import Any, ClassVar

from polyformer.checkpoints.families.bert import (
    COPIES,
    FIELDS,
    MASKED,
    PRETRAINING,
    TRUNK,
    check_types,
)
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Field, Tree, act, field, look_up, put
from polyformer.core.errors import InputError, quote
from polyformer.heads import ClassifyConfig, EmbedConfig, MaskedConfig, PretrainingConfig, TagConfig
from polyformer.presets import model_config
from polyformer.presets.bigbird import bigbird_pattern

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50358,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PATTERN = "encoder.attention.mechanism.pattern"
POOLER = {"{base}pooler": "head.dense"}
UNPOOLED = ("{base}pooler.*",)
"""What classes that pool nothing have all the same."""
WITHOUT_BIAS = ["output"]
OWN = (
    Field(
        "use_bias",
        True,
        ("encoder.attention.bias",),
        lambda given: True if given else WITHOUT_BIAS,
        lambda ours: ours is True,
    ),
    field("rescale_embeddings", False, "embedding.scaled"),
)


@register
class BigBird(Family):
    """The encoder in its ITC form."""

    model_type = "big_bird"
    classes = "BigBird"
    paper = "Zaheer et al. 2020"
    objective = "masked language modelling"
    base = "bert"
    template = model_config("bigbird-base")
    fields = (
        *(dataclasses.replace(one, default=DEFAULTS.get(one.theirs, one.default)) for one in FIELDS),
        *OWN,
    )
    adjusted = ("attention_type", "block_size", "num_random_blocks")
    fixed: ClassVar = {"is_decoder": False, "add_cross_attention": False}
    inert = ("use_cache", "sep_token_id")
    names = TRUNK
    ignored = ("*embeddings.position_ids", "*embeddings.token_type_ids")
    dropouts = ("classifier_dropout", "hidden_dropout_prob")
    tasks: ClassVar = {
        "Model": Task(EmbedConfig(pooling="first", hidden=True, normalize=False), POOLER, base=False),
        "ForPreTraining": Task(
            PretrainingConfig(sentence=ClassifyConfig(dropout=0.0)),
            {name.replace("pooler.dense", "pooler"): ours for name, ours in PRETRAINING.items()},
            (
                act("hidden_act", "gelu_new", "tokens.activation"),
                field("layer_norm_eps", 1e-12, "tokens.eps"),
            ),
            COPIES,
        ),
        "ForMaskedLM": Task(
            MaskedConfig(),
            MASKED,
            (act("hidden_act", "gelu_new", "activation"), field("layer_norm_eps", 1e-12, "eps")),
            COPIES,
            unused_keys=UNPOOLED,
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(drops_twice=True),
            {"classifier.dense": "head.dense", "classifier.out_proj": "head.output"},
            (act("hidden_act", "gelu_new", "activation"),),
            unused_keys=UNPOOLED,
        ),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}, unused_keys=UNPOOLED),
    }
    sizes = ("bigbird-base",)

    def check(self, hub: Tree) -> None:
        kind = hub.get("attention_type", "block_sparse")
        if kind not in ("block_sparse", "original_full"):
            raise InputError(
                f"config.json: attention_type is {quote(kind)}, expected 'block_sparse' or 'original_full'"
            )
        if kind == "block_sparse" and hub.get("num_random_blocks", 3) < 1:
            raise InputError("config.json: num_random_blocks is 0, expected 1 or more, as transformers does")
        check_types(hub)

    def adjust(self, tree: Tree, hub: Tree) -> None:
        pattern = None
        if hub.get("attention_type", "block_sparse") == "block_sparse":
            layers = tree["encoder"]["num_hidden_layers"]
            block, random = hub.get("block_size", 64), hub.get("num_random_blocks", 3)
            pattern = bigbird_pattern(layers, block, random).to_text()
        put(tree, PATTERN, pattern)

    def describe(self, tree: Tree) -> Tree:
        text = look_up(tree, PATTERN)
        if text is None:
            return {"attention_type": "original_full"}
        block, random = (
            re.search(one, text) for one in (r"BlockWindow\(size=(\d+)", r"Random\(blocks=(\d+)")
        )
        return {
            "attention_type": "block_sparse",
            "block_size": int(block[1]) if block else 64,
            "num_random_blocks": int(random[1]) if random else 3,
        }
