"""GPT: post-norm decoder without a norm at its end. Radford et al. 2018."""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import Tree, choice, option
from polyformer.models.checkpoints.families.gpt2 import LAYER
from polyformer.models.checkpoints.families.gpt_common import (
    BUFFERS,
    DROPOUTS,
    LAST_TOKEN,
    SUMMARY_OPTIONS,
    GptFamily,
    double_heads,
)
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import EmbedConfig, LanguageModelConfig

TRUNK = {
    "tokens_embed": "tokens",
    "positions_embed": "decoder.position.tables.0",
    **layered("h.{i}", "decoder.layers.{i}", LAYER),
}
TIED_KEYS = {"lm_head.weight": "transformer.tokens_embed.weight"}
ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
"""The activations by their names in GPT; its "gelu" is the approximation by tanh."""

OPTIONS = (
    option("vocab_size", 40478, "vocab_size"),
    option("n_embd", 768, "hidden_size"),
    option("n_positions", 512, "max_position_embeddings"),
    option("n_layer", 12, "decoder.num_hidden_layers"),
    option("n_head", 12, "decoder.attention.num_attention_heads"),
    choice("afn", "gelu", ACTIVATIONS, "decoder.feedforward.activation"),
    option("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    option("initializer_range", 0.02, "initializer_range"),
    *DROPOUTS,
    option("pad_token_id", None, "special.pad"),
    option("bos_token_id", None, "special.bos"),
    option("eos_token_id", None, "special.eos"),
    option("tie_word_embeddings", True, "embedding.tied"),
)


@register
class Gpt(GptFamily):
    """A decoder with a feed-forward layer that is always four times as wide as the model."""

    model_type = "openai-gpt"
    class_prefix = "OpenAIGPT"
    paper = "Radford et al. 2018"
    objective = "causal language modelling"
    template = model_config("gpt")
    config_mapping = OPTIONS
    ignored_options = SUMMARY_OPTIONS
    key_mapping = TRUNK
    ignored_keys = (*BUFFERS, "*position_ids")
    tasks: ClassVar = {
        "LMHeadModel": Task(
            LanguageModelConfig(),
            {"lm_head": "head"},
            tied_keys=TIED_KEYS,
        ),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(LAST_TOKEN, {"score": "head.output"}),
        "DoubleHeadsModel": double_heads(TIED_KEYS),
    }
    sizes = ("gpt",)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the inner width, which is not an option."""
        tree["decoder"]["feedforward"]["intermediate_size"] = None
        super().read_other_options(tree, hub)
