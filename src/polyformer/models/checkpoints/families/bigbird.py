"""BigBird: BERT's layers with full attention, or over blocks of a window, first, last and random blocks.

transformers draws random blocks only in training. In evaluation it reads the first block instead of each
random block, though the query attends to that block already; here random blocks are drawn in both modes, and
no key counts twice. So outputs are equal for full attention and for texts within the window and the random
blocks. For long texts they are equal if both have the same random blocks, and the text is unpadded and a
whole number of blocks: transformers' blocks belong to the padded row, ours to each text.

Zaheer et al. 2020.
"""

from typing import ClassVar

from polyformer.attention.patterns import BlockWindow, Pattern, Random
from polyformer.attention.patterns.base import patterns_in
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    Tree,
    activation,
    get_path,
    option,
    projection_biases,
    set_path,
    with_defaults,
)
from polyformer.models.checkpoints.families.bert import (
    COPIES,
    MASKED,
    NEXT_SENTENCE,
    OPTIONS,
    PRETRAINING,
    TRANSFORM,
    TRUNK,
    BertFamily,
    as_decoder,
    transform_options,
)
from polyformer.models.checkpoints.families.common import as_pooled, pooled
from polyformer.models.checkpoints.families.roberta import CLASSIFIER
from polyformer.models.checkpoints.family import FamilyTables, Task, register
from polyformer.models.presets import model_config
from polyformer.models.presets.long_texts import bigbird_pattern
from polyformer.nn.heads import ClassifyConfig, MaskedConfig, ResidualConfig, SpanConfig, TagConfig

PATTERN = "encoder.attention.mechanism.pattern"


class BlockSparseFamily(FamilyTables):
    """The options of a family in which `attention_type` selects the pattern of the encoder."""

    other_options: ClassVar = {"attention_type": "block_sparse", "block_size": 64, "num_random_blocks": 3}

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for unknown attention, and for blocks without random blocks."""
        super().check(hub)
        kind = hub["attention_type"]
        if kind not in ("block_sparse", "original_full"):
            raise InputError(
                f"config.json: attention_type is {quote(kind)}, expected 'block_sparse' or 'original_full'"
            )
        if kind == "block_sparse" and hub["num_random_blocks"] < 1:
            raise InputError("config.json: num_random_blocks is 0, expected 1 or more, as transformers does")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern; none for full attention."""
        pattern = None
        if hub["attention_type"] == "block_sparse":
            layers = tree["encoder"]["num_hidden_layers"]
            block, random = hub["block_size"], hub["num_random_blocks"]
            pattern = bigbird_pattern(layers, block, random).to_text()
        set_path(tree, PATTERN, pattern)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the pattern; none without an encoder."""
        if tree["encoder"] is None:
            return {}
        text = get_path(tree, PATTERN)
        if text is None:
            return {"attention_type": "original_full"}
        hub: Tree = {"attention_type": "block_sparse", "block_size": 64, "num_random_blocks": 3}
        for part in patterns_in(Pattern.from_text(text)):
            if isinstance(part, BlockWindow):
                hub["block_size"] = part.size
            elif isinstance(part, Random):
                hub["num_random_blocks"] = part.blocks
        return hub


# Tensors of the pooler in classes without pooling.
UNPOOLED = ("{base}pooler.*",)


@register
class BigBird(BlockSparseFamily, BertFamily):
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
        *with_defaults(
            OPTIONS,
            {"vocab_size": 50358, "hidden_act": "gelu_new", "max_position_embeddings": 4096}
            | {"bos_token_id": 1, "eos_token_id": 2},
        ),
        projection_biases("use_bias"),
        option("rescale_embeddings", False, "embedding.scaled"),
    )
    required: ClassVar = {"is_decoder": False, "add_cross_attention": False}
    ignored_options = ("use_cache", "sep_token_id")
    key_mapping = TRUNK
    ignored_keys = ("*embeddings.position_ids", "*embeddings.token_type_ids")
    tasks: ClassVar = {
        "Model": pooled("{base}pooler"),
        "ForPreTraining": Task(
            NEXT_SENTENCE,
            {name.replace("pooler.dense", "pooler"): ours for name, ours in PRETRAINING.items()},
            transform_options("gelu_new", "tokens."),
            COPIES,
        ),
        "ForMaskedLM": Task(
            MaskedConfig(), MASKED, transform_options("gelu_new"), COPIES, unused_keys=UNPOOLED
        ),
        "ForCausalLM": as_decoder(
            MASKED,
            TRANSFORM,
            COPIES,
            *transform_options("gelu_new", "transform."),
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
                "qa_classifier.[intermediate.dense|output.dense]": "head.transform.[up|down]",
                "qa_classifier.output.LayerNorm": "head.transform.norm",
                "qa_classifier.qa_outputs": "head.output",
            },
            (
                # the id of [SEP], which ends the question
                option("sep_token_id", 66, "question_end"),
                option("intermediate_size", 3072, "residual.intermediate_size"),
                *transform_options("gelu_new", "residual."),
                option("hidden_dropout_prob", 0.1, "residual.dropout"),
            ),
            unused_keys=UNPOOLED,
        ),
    }
    sizes = ("bigbird-base",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` also for a decoder with block-sparse attention."""
        super().check(hub)
        if hub["attention_type"] == "block_sparse" and hub.get("is_decoder", False):
            raise InputError("config.json: attention_type is missing; a decoder needs 'original_full'")
