"""LED: BART with Longformer's encoder, for long documents. Beltagy et al. 2020, section 7.

Its encoder has windows, and global tokens with projections of their own, which the caller marks
(`global_attention_mask`); its decoder attends to all tokens. Both have tables of positions of their own
length.
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.positions import LearnedConfig
from polyformer.models.checkpoints.config_mapping import Tree, get_path, option, set_path, with_defaults
from polyformer.models.checkpoints.families.bart import (
    ENDS,
    MODEL,
    OPTIONS,
    TABLES,
    Bart,
    stack,
    stack_tables,
)
from polyformer.models.checkpoints.families.roberta import PATTERN, Longformer, window_of, window_pattern
from polyformer.models.checkpoints.family import register
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config

ATTENTION = {
    "self_attn.longformer_self_attn.[query|key|value]": "attention.[query|key|value]",
    "self_attn.longformer_self_attn.[query|key|value]_global": "attention.global_attention.[query|key|value]",
    "self_attn.output": "attention.output",
}


@register
class Led(Bart):
    """A summarizer of long texts."""

    model_type = "led"
    class_prefix = "LED"
    paper = "Beltagy et al. 2020"
    objective = "none: BART's weights, with a longer table of positions"
    base_model_prefix = "led"
    assert Longformer.template.encoder is not None
    template = (
        model_config("bart-base")
        .override("position", LearnedConfig())
        .override("encoder.attention", Longformer.template.encoder.attention)
        .override("encoder.attention.mechanism.dropout", 0.0)
    )
    config_mapping = (
        *with_defaults(OPTIONS, {}, "max_position_embeddings"),
        option("max_encoder_position_embeddings", 16384, "max_position_embeddings"),
        option("max_decoder_position_embeddings", 1024, "decoder.position.length"),
    )
    required: ClassVar = {}
    other_options: ClassVar = {"attention_window": 512}
    key_mapping: ClassVar = {
        **TABLES,
        **stack("encoder", 2, ENDS, ATTENTION),
        **stack("decoder", 3, ENDS),
    }
    num_labels = 2
    tasks: ClassVar = {
        "ForConditionalGeneration": dataclasses.replace(
            Bart.tasks["ForConditionalGeneration"],
            tied_keys={"lm_head.weight": "led.shared.weight", **stack_tables("led.")},
        ),
        "Model": MODEL,
        "ForQuestionAnswering": dataclasses.replace(
            Bart.tasks["ForQuestionAnswering"], tied_keys=stack_tables("led.")
        ),
    }
    sizes = ()

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the windows of the encoder."""
        layers = tree["encoder"]["num_hidden_layers"]
        set_path(tree, PATTERN, window_pattern(hub["attention_window"], layers).to_text())

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the window of each layer of the encoder."""
        layers = get_path(tree, "encoder.num_hidden_layers") or 0
        return {"attention_window": [window_of(get_path(tree, PATTERN), layer) for layer in range(layers)]}

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return the same as for BART, by names without the prefix of this family."""
        return super().has_tensor(config, task, theirs.removeprefix("led."))
