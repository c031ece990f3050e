"""BigBird-Pegasus: BigBird's encoder, and BART's decoder in pre-norm order. Zaheer et al. 2020.

In training, transformers applies neither attention dropout in block-sparse attention nor activation dropout
in the encoder. Here attention dropout applies to both stacks, and activation dropout only to the decoder.
"""

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import flag, option, with_defaults
from polyformer.models.checkpoints.families.bart import OPTIONS, TABLES, Bart, stack
from polyformer.models.checkpoints.families.block_sparse import BlockSparseFamily
from polyformer.models.checkpoints.family import register
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config

ENDS = {"embed_positions": ".position.tables.0", "layernorm_embedding": ".final_norm"}
ENCODER_ATTENTION = {
    "self_attn.self.[query|key|value]": "attention.[query|key|value]",
    "self_attn.output": "attention.output",
}


@register
class BigBirdPegasus(BlockSparseFamily, Bart):
    """A summarizer of long texts."""

    model_type = "bigbird_pegasus"
    class_prefix = "BigBirdPegasus"
    paper = "Zaheer et al. 2020"
    objective = "sentences written from the rest of the text, then summaries"
    template = model_config("bigbird-pegasus-large")
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 96103, "max_position_embeddings": 4096, "activation_function": "gelu_new"}
            | {"encoder_layers": 16, "decoder_layers": 16, "scale_embedding": True}
            | {"pad_token_id": 0, "eos_token_id": 1},
            "activation_dropout",
        ),
        option("activation_dropout", 0.0, "decoder.feedforward.inner_dropout"),
        flag("use_bias", "encoder.attention.bias", "decoder.attention.bias"),
    )
    required: ClassVar = {}
    ignored_options = (
        *("bos_token_id", "chunk_size_feed_forward", "gradient_checkpointing"),
        *("is_decoder", "is_encoder_decoder", "use_cache"),
    )
    num_labels = 2
    key_mapping: ClassVar = {
        **TABLES,
        **stack("encoder", 2, ENDS, ENCODER_ATTENTION),
        **stack("decoder", 3, ENDS),
    }
    tasks: ClassVar = {
        **Bart.tasks,
        "ForSequenceClassification": dataclasses.replace(
            Bart.tasks["ForSequenceClassification"], config_mapping=(option("eos_token_id", 1, "end_token"),)
        ),
        "ForCausalLM": dataclasses.replace(
            Bart.tasks["ForCausalLM"],
            tied_keys={},
            trunk={"decoder.embed_tokens": "tokens", **stack("decoder", 2, ENDS)},
        ),
    }
    sizes = ("bigbird-pegasus-large",)

    def fitted(self, config: ModelConfig, stored: Collection[str]) -> ModelConfig:
        """Return the configuration of an untied decoder: transformers never ties `ForCausalLM`."""
        if config.encoder is not None or "lm_head.weight" not in stored:
            return config
        embedding = dataclasses.replace(config.embedding, tied=False, shared=False)
        return dataclasses.replace(config, embedding=embedding)
