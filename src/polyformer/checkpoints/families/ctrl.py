"""CTRL: pre-norm decoder with sinusoids and scaled embeddings; its texts begin with a control code.

Keskar et al. 2019. The code is a token like any other: put it before the prompt.
"""

from typing import ClassVar

from polyformer.checkpoints.families.gpt2 import ALIASES, LAST, embedding_dropout, settle
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, field
from polyformer.checkpoints.names import layered
from polyformer.heads import EmbedConfig, LanguageModelConfig
from polyformer.presets import model_config

LAYER = {
    "multi_head_attention.Wq": "attention.query",
    "multi_head_attention.Wk": "attention.key",
    "multi_head_attention.Wv": "attention.value",
    "multi_head_attention.dense": "attention.output",
    "ffn.0": "feedforward.up",
    "ffn.2": "feedforward.down",
    "layernorm1": "block.norms.0",
    "layernorm2": "block.norms.1",
}
FIELDS = (
    field("vocab_size", 246534, "vocab_size"),
    field("n_embd", 1280, "hidden_size"),
    field("n_positions", 256, "max_position_embeddings"),
    field("n_layer", 48, "decoder.num_hidden_layers"),
    field("n_head", 16, "decoder.attention.num_attention_heads"),
    field("dff", 8192, "decoder.feedforward.intermediate_size"),
    field("resid_pdrop", 0.1, "decoder.dropout"),
    field("embd_pdrop", 0.1, "embedding.embedding_dropout"),
    field("initializer_range", 0.02, "initializer_range"),
    field("pad_token_id", None, "special.pad"),
    field("bos_token_id", None, "special.bos"),
    field("eos_token_id", None, "special.eos"),
    field("tie_word_embeddings", True, "embedding.tied"),
)


@register
class Ctrl(Family):
    """Its layers' norms have an epsilon of 1e-6 whatever is configured, so the last must have it too."""

    model_type = "ctrl"
    classes = "CTRL"
    paper = "Keskar et al. 2019"
    objective = "causal language modelling after a control code"
    base = "transformer"
    template = model_config("ctrl")
    fields = FIELDS
    aliases: ClassVar = ALIASES
    fixed: ClassVar = {"layer_norm_epsilon": 1e-6}
    inert = ("use_cache", "attn_pdrop")
    names: ClassVar = {
        "w": "tokens",
        **layered("h.{i}", "decoder.layers.{i}", LAYER),
        "layernorm": "decoder.final_norm",
    }
    ignored = ("*pos_encoding",)
    tasks: ClassVar = {
        "LMHeadModel": Task(
            LanguageModelConfig(bias=True),
            {"lm_head": "head"},
            copies={"lm_head.weight": "transformer.w.weight"},
        ),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), base=False),
        "ForSequenceClassification": Task(LAST, {"classifier": "head.output"}),
    }
    sizes = ("ctrl",)

    def adjust(self, tree: Tree, hub: Tree) -> None:
        settle(tree)

    def describe(self, tree: Tree) -> Tree:
        return {"embd_pdrop": embedding_dropout(tree)}
