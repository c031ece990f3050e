"""BigBird: BERT's layers over blocks of a window, first, last and random blocks. Zaheer et al. 2020.

transformers draws random blocks only in training. In evaluation it reads the first block instead of each
random block, though the query attends to that block already; here random blocks are drawn in both modes, and
no key counts twice. So outputs are equal for full attention and for texts within the window and the random
blocks. For long texts they are equal if both have the same random blocks, and the text is unpadded and a
whole number of blocks: transformers' blocks belong to the padded row, ours to each text.
"""

import re
from typing import Any, ClassVar

from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    Option,
    Tree,
    activation,
    get_path,
    option,
    set_path,
    with_defaults,
)
from polyformer.models.checkpoints.families.bert import (
    COPIES,
    MASKED,
    OPTIONS,
    PRETRAINING,
    TRANSFORM,
    TRUNK,
    BertFamily,
    as_decoder,
)
from polyformer.models.checkpoints.families.roberta import CLASSIFIER
from polyformer.models.checkpoints.families.shared_tasks import as_pooled
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.presets import model_config
from polyformer.models.presets.bigbird import bigbird_pattern
from polyformer.nn.heads import (
    ClassifyConfig,
    EmbedConfig,
    MaskedConfig,
    PretrainingConfig,
    ResidualConfig,
    SpanConfig,
    TagConfig,
)

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
"""Tensors of the pooler in classes without pooling."""
WITHOUT_BIAS = ["output"]
OWN = (
    Option(
        "use_bias",
        True,
        ("encoder.attention.bias",),
        lambda theirs: True if theirs else WITHOUT_BIAS,
        lambda ours: ours is True,
    ),
    option("rescale_embeddings", False, "embedding.scaled"),
)


@register
class BigBird(BertFamily):
    """The encoder in its ITC form, and the decoder, in which every token sees all tokens before it.

    With `attention_type="block_sparse"`, tokens of long texts see later tokens in a decoder of transformers.
    This is refused.
    """

    model_type = "big_bird"
    class_prefix = "BigBird"
    paper = "Zaheer et al. 2020"
    objective = "masked language modelling"
    base_model_prefix = "bert"
    template = model_config("bigbird-base")
    config_mapping = (
        *with_defaults(OPTIONS, DEFAULTS),
        *OWN,
    )
    other_options = ("attention_type", "block_size", "num_random_blocks")
    required: ClassVar = {"is_decoder": False, "add_cross_attention": False}
    ignored_options = ("use_cache", "sep_token_id")
    key_mapping = TRUNK
    ignored_keys = ("*embeddings.position_ids", "*embeddings.token_type_ids")
    tasks: ClassVar = {
        "Model": Task(EmbedConfig(pooling="first", hidden=True, normalize=False), POOLER, prefixed=False),
        "ForPreTraining": Task(
            PretrainingConfig(sentence=ClassifyConfig(dropout=0.0)),
            {name.replace("pooler.dense", "pooler"): ours for name, ours in PRETRAINING.items()},
            (
                activation("hidden_act", "gelu_new", "tokens.activation"),
                option("layer_norm_eps", 1e-12, "tokens.eps"),
            ),
            COPIES,
        ),
        "ForMaskedLM": Task(
            MaskedConfig(),
            MASKED,
            (activation("hidden_act", "gelu_new", "activation"), option("layer_norm_eps", 1e-12, "eps")),
            COPIES,
            unused_keys=UNPOOLED,
        ),
        "ForCausalLM": as_decoder(
            MASKED,
            TRANSFORM,
            COPIES,
            activation("hidden_act", "gelu_new", "transform.activation"),
            unused_keys=UNPOOLED,
            required={"attention_type": "original_full"},
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(drops_twice=True),
            CLASSIFIER,
            (activation("hidden_act", "gelu_new", "activation"),),
            unused_keys=UNPOOLED,
        ),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}, unused_keys=UNPOOLED),
        "ForMultipleChoice": as_pooled("{base}pooler"),
        "ForQuestionAnswering": Task(
            SpanConfig(question_end=66, residual=ResidualConfig()),
            {
                "qa_classifier.intermediate.dense": "head.transform.up",
                "qa_classifier.output.dense": "head.transform.down",
                "qa_classifier.output.LayerNorm": "head.transform.norm",
                "qa_classifier.qa_outputs": "head.output",
            },
            (
                option("sep_token_id", 66, "question_end"),
                option("intermediate_size", 3072, "residual.intermediate_size"),
                activation("hidden_act", "gelu_new", "residual.activation"),
                option("layer_norm_eps", 1e-12, "residual.eps"),
                option("hidden_dropout_prob", 0.1, "residual.dropout"),
            ),
            unused_keys=UNPOOLED,
        ),
    }
    sizes = ("bigbird-base",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for other kinds of attention, and for block-sparse attention in decoders or
        without random blocks.
        """
        super().check(hub)
        kind = hub.get("attention_type", "block_sparse")
        if kind not in ("block_sparse", "original_full"):
            raise InputError(
                f"config.json: attention_type is {quote(kind)}, expected 'block_sparse' or 'original_full'"
            )
        if kind == "block_sparse" and hub.get("is_decoder", False):
            raise InputError("config.json: attention_type is missing; a decoder needs 'original_full'")
        if kind == "block_sparse" and hub.get("num_random_blocks", 3) < 1:
            raise InputError("config.json: num_random_blocks is 0, expected 1 or more, as transformers does")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern; none for full attention."""
        pattern = None
        if hub.get("attention_type", "block_sparse") == "block_sparse":
            layers = tree["encoder"]["num_hidden_layers"]
            block, random = hub.get("block_size", 64), hub.get("num_random_blocks", 3)
            pattern = bigbird_pattern(layers, block, random).to_text()
        set_path(tree, PATTERN, pattern)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the pattern, which is parsed as text."""
        text = get_path(tree, PATTERN)
        if text is None:
            return {"attention_type": "original_full"}
        block = re.search(r"BlockWindow\(size=(\d+)", text)
        random = re.search(r"Random\(blocks=(\d+)", text)
        return {
            "attention_type": "block_sparse",
            "block_size": int(block[1]) if block else 64,
            "num_random_blocks": int(random[1]) if random else 3,
        }
