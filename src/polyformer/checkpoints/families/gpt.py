"""GPT: post-norm decoder without a norm at its end. Radford et al. 2018."""

from typing import ClassVar

from polyformer.checkpoints.families.gpt2 import (
    ALIASES,
    BUFFERS,
    DROPOUTS,
    LAST,
    LAYER,
    SUMMARY,
    embedding_dropout,
    settle,
)
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, choice, field
from polyformer.checkpoints.names import layered
from polyformer.heads import EmbedConfig, LanguageModelConfig
from polyformer.presets import model_config

TRUNK = {
    "tokens_embed": "tokens",
    "positions_embed": "decoder.position.tables.0",
    **layered("h.{i}", "decoder.layers.{i}", LAYER),
}
ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
"""Its "gelu" is the approximation by tanh."""

FIELDS = (
    field("vocab_size", 40478, "vocab_size"),
    field("n_embd", 768, "hidden_size"),
    field("n_positions", 512, "max_position_embeddings"),
    field("n_layer", 12, "decoder.num_hidden_layers"),
    field("n_head", 12, "decoder.attention.num_attention_heads"),
    choice("afn", "gelu", ACTIVATIONS, "decoder.feedforward.activation"),
    field("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    field("initializer_range", 0.02, "initializer_range"),
    *DROPOUTS,
    field("pad_token_id", None, "special.pad"),
    field("bos_token_id", None, "special.bos"),
    field("eos_token_id", None, "special.eos"),
    field("tie_word_embeddings", True, "embedding.tied"),
)


@register
class Gpt(Family):
    """The first of the decoders; its feed-forward is always four times as wide as the model."""

    model_type = "openai-gpt"
    classes = "OpenAIGPT"
    paper = "Radford et al. 2018"
    objective = "causal language modelling"
    base = "transformer"
    template = model_config("gpt")
    fields = FIELDS
    aliases: ClassVar = ALIASES
    inert = SUMMARY
    names = TRUNK
    ignored = (*BUFFERS, "*position_ids")
    tasks: ClassVar = {
        "LMHeadModel": Task(
            LanguageModelConfig(),
            {"lm_head": "head"},
            copies={"lm_head.weight": "transformer.tokens_embed.weight"},
        ),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), base=False),
        "ForSequenceClassification": Task(LAST, {"score": "head.output"}),
    }
    sizes = ("gpt",)

    def adjust(self, tree: Tree, hub: Tree) -> None:
        tree["decoder"]["feedforward"]["intermediate_size"] = None
        settle(tree)

    def describe(self, tree: Tree) -> Tree:
        return {"embd_pdrop": embedding_dropout(tree)}
