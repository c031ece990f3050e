"""CTRL: pre-norm decoder with sinusoids and scaled embeddings; its texts begin with a control code.

Keskar et al. 2019. The code is a token like any other: put it before the prompt.
"""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import option
from polyformer.models.checkpoints.families.gpt_common import LAST_TOKEN, GptFamily
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import EmbedConfig, LanguageModelConfig

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
OPTIONS = (
    option("vocab_size", 246534, "vocab_size"),
    option("n_embd", 1280, "hidden_size"),
    option("n_positions", 256, "max_position_embeddings"),
    option("n_layer", 48, "decoder.num_hidden_layers"),
    option("n_head", 16, "decoder.attention.num_attention_heads"),
    option("dff", 8192, "decoder.feedforward.intermediate_size"),
    option("resid_pdrop", 0.1, "decoder.dropout"),
    option("embd_pdrop", 0.1, "embedding.embedding_dropout"),
    option("initializer_range", 0.02, "initializer_range"),
    option("pad_token_id", None, "special.pad"),
    option("bos_token_id", None, "special.bos"),
    option("eos_token_id", None, "special.eos"),
    option("tie_word_embeddings", True, "embedding.tied"),
)


@register
class Ctrl(GptFamily):
    """A decoder with a fixed norm epsilon of 1e-6 in its layers; the option must give the last norm the
    same.
    """

    model_type = "ctrl"
    class_prefix = "CTRL"
    paper = "Keskar et al. 2019"
    objective = "causal language modelling after a control code"
    template = model_config("ctrl")
    config_mapping = OPTIONS
    required: ClassVar = {"layer_norm_epsilon": 1e-6}
    ignored_options = ("use_cache", "attn_pdrop")
    key_mapping: ClassVar = {
        "w": "tokens",
        **layered("h.{i}", "decoder.layers.{i}", LAYER),
        "layernorm": "decoder.final_norm",
    }
    ignored_keys = ("*pos_encoding",)
    tasks: ClassVar = {
        "LMHeadModel": Task(
            LanguageModelConfig(bias=True),
            {"lm_head": "head"},
            tied_keys={"lm_head.weight": "transformer.w.weight"},
        ),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(LAST_TOKEN, {"classifier": "head.output"}),
    }
    sizes = ("ctrl",)
