"""GPT-J: attention parallel to the feed-forward layer, rotary positions. Wang and Komatsuzaki 2021."""

import math
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Tree, activation, get_path, option
from polyformer.models.checkpoints.families.gpt_common import (
    BUFFERS,
    LAST_TOKEN,
    MECHANISM,
    TIED_KEYS,
    GptFamily,
)
from polyformer.models.checkpoints.families.shared_tasks import QUESTION_ANSWERING
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import EmbedConfig, LanguageModelConfig

LAYER = {
    "ln_1": "block.norms.0",
    "attn.q_proj": "attention.query",
    "attn.k_proj": "attention.key",
    "attn.v_proj": "attention.value",
    "attn.out_proj": "attention.output",
    "mlp.fc_in": "feedforward.up",
    "mlp.fc_out": "feedforward.down",
}
OPTIONS = (
    option("vocab_size", 50400, "vocab_size"),
    option("n_embd", 4096, "hidden_size"),
    option("n_positions", 2048, "max_position_embeddings"),
    option("n_layer", 28, "decoder.num_hidden_layers"),
    option("n_head", 16, "decoder.attention.num_attention_heads"),
    option("n_inner", None, "decoder.feedforward.intermediate_size"),
    activation("activation_function", "gelu_new", "decoder.feedforward.activation"),
    option("resid_pdrop", 0.0, "decoder.dropout"),
    option("embd_pdrop", 0.0, "embedding.embedding_dropout"),
    option("attn_pdrop", 0.0, f"{MECHANISM}.dropout"),
    option("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    option("initializer_range", 0.02, "initializer_range"),
    option("pad_token_id", None, "special.pad"),
    option("bos_token_id", 50256, "special.bos"),
    option("eos_token_id", 50256, "special.eos"),
    option("tie_word_embeddings", False, "embedding.tied"),
)


@register
class GptJ(GptFamily):
    """A decoder with `rotary_dim` rotated channels of each head, in adjacent pairs."""

    model_type = "gptj"
    class_prefix = "GPTJ"
    paper = "Wang and Komatsuzaki 2021"
    objective = "causal language modelling"
    template = model_config("gpt-j-6b")
    config_mapping = OPTIONS
    other_options = ("rotary_dim",)
    ignored_options = ("use_cache",)
    key_mapping: ClassVar = {
        "wte": "tokens",
        **layered("h.{i}", "decoder.layers.{i}", LAYER),
        "ln_f": "decoder.final_norm",
    }
    ignored_keys = (*BUFFERS, "*.attn.embed_positions")
    tasks: ClassVar = {
        "ForCausalLM": Task(LanguageModelConfig(bias=True), {"lm_head": "head"}, tied_keys=TIED_KEYS),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(LAST_TOKEN, {"score": "head.output"}),
        "ForQuestionAnswering": QUESTION_ANSWERING,
    }
    sizes = ("gpt-j-6b",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` unless the number of rotated channels is even, above 0 and within a head."""
        width = hub.get("n_embd", 4096) // hub.get("n_head", 16)
        rotary_dim = hub.get("rotary_dim", 64)
        if rotary_dim is None or not 2 <= rotary_dim <= width or rotary_dim % 2:
            raise InputError(
                f"config.json: rotary_dim is {rotary_dim}; expected an even number up to {width}, "
                f"the width of a head"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set also the fraction of a head that is rotated."""
        super().read_other_options(tree, hub)
        fraction = rotary_fraction(hub.get("rotary_dim", 64), _head_size(tree))
        tree["decoder"]["position"]["fraction"] = fraction

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the number of rotated channels."""
        fraction = get_path(tree, "decoder.position.fraction")
        if fraction is None:
            return {}
        return {**super().write_other_options(tree), "rotary_dim": int(_head_size(tree) * fraction)}


def rotary_fraction(rotary_dim: int, head_size: int) -> float:
    """Return the fraction of a head that gives `rotary_dim` channels again after rounding down."""
    fraction = rotary_dim / head_size
    return fraction if int(head_size * fraction) == rotary_dim else math.nextafter(fraction, 1)


def _head_size(tree: Tree) -> int:
    return tree["hidden_size"] // tree["decoder"]["attention"]["num_attention_heads"]
