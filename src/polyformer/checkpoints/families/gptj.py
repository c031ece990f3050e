"""GPT-J: attention beside feed-forward, heads turned by position. Wang and Komatsuzaki 2021."""

import math
from typing import ClassVar

from polyformer.checkpoints.families.gpt2 import (
    ALIASES,
    BUFFERS,
    COPIES,
    LAST,
    MECHANISM,
    embedding_dropout,
    settle,
)
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, act, field, look_up
from polyformer.checkpoints.names import layered
from polyformer.core.errors import InputError
from polyformer.heads import EmbedConfig, LanguageModelConfig, SpanConfig
from polyformer.presets import model_config

LAYER = {
    "ln_1": "block.norms.0",
    "attn.q_proj": "attention.query",
    "attn.k_proj": "attention.key",
    "attn.v_proj": "attention.value",
    "attn.out_proj": "attention.output",
    "mlp.fc_in": "feedforward.up",
    "mlp.fc_out": "feedforward.down",
}
FIELDS = (
    field("vocab_size", 50400, "vocab_size"),
    field("n_embd", 4096, "hidden_size"),
    field("n_positions", 2048, "max_position_embeddings"),
    field("n_layer", 28, "decoder.num_hidden_layers"),
    field("n_head", 16, "decoder.attention.num_attention_heads"),
    field("n_inner", None, "decoder.feedforward.intermediate_size"),
    act("activation_function", "gelu_new", "decoder.feedforward.activation"),
    field("resid_pdrop", 0.0, "decoder.dropout"),
    field("embd_pdrop", 0.0, "embedding.embedding_dropout"),
    field("attn_pdrop", 0.0, f"{MECHANISM}.dropout"),
    field("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    field("initializer_range", 0.02, "initializer_range"),
    field("pad_token_id", None, "special.pad"),
    field("bos_token_id", 50256, "special.bos"),
    field("eos_token_id", 50256, "special.eos"),
    field("tie_word_embeddings", False, "embedding.tied"),
)


@register
class GptJ(Family):
    """`rotary_dim` channels of each head are turned, in neighbouring pairs."""

    model_type = "gptj"
    classes = "GPTJ"
    paper = "Wang and Komatsuzaki 2021"
    objective = "causal language modelling"
    base = "transformer"
    template = model_config("gpt-j-6b")
    fields = FIELDS
    aliases: ClassVar = ALIASES
    adjusted = ("rotary_dim",)
    inert = ("use_cache",)
    names: ClassVar = {
        "wte": "tokens",
        **layered("h.{i}", "decoder.layers.{i}", LAYER),
        "ln_f": "decoder.final_norm",
    }
    ignored = (*BUFFERS, "*.attn.embed_positions")
    tasks: ClassVar = {
        "ForCausalLM": Task(LanguageModelConfig(bias=True), {"lm_head": "head"}, copies=COPIES),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), base=False),
        "ForSequenceClassification": Task(LAST, {"score": "head.output"}),
        "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}),
    }
    sizes = ("gpt-j-6b",)

    def check(self, hub: Tree) -> None:
        width = hub.get("n_embd", 4096) // hub.get("n_head", 16)
        turned = hub.get("rotary_dim", 64)
        if turned is None or not 2 <= turned <= width or turned % 2:
            raise InputError(
                f"config.json: rotary_dim is {turned}; expected an even number up to {width}, "
                f"the width of a head"
            )

    def adjust(self, tree: Tree, hub: Tree) -> None:
        settle(tree)
        width = tree["hidden_size"] // tree["decoder"]["attention"]["num_attention_heads"]
        tree["decoder"]["position"]["fraction"] = _fraction(hub.get("rotary_dim", 64), width)

    def describe(self, tree: Tree) -> Tree:
        fraction = look_up(tree, "decoder.position.fraction")
        if fraction is None:
            return {}
        width = tree["hidden_size"] // tree["decoder"]["attention"]["num_attention_heads"]
        return {"rotary_dim": int(width * fraction), "embd_pdrop": embedding_dropout(tree)}


def _fraction(turned: int, width: int) -> float:
    """So much of a head that rounding down gives `turned` channels again."""
    fraction = turned / width
    return fraction if int(width * fraction) == turned else math.nextafter(fraction, 1)
