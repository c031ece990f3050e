"""GPT-2: pre-norm decoder, learned positions, one matrix for q, k and v. Radford et al. 2019."""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import Option, Tree, activation, choice, option
from polyformer.models.checkpoints.families.gpt_common import (
    BUFFERS,
    DROPOUTS,
    LAST_TOKEN,
    MECHANISM,
    SPECIAL,
    SUMMARY_OPTIONS,
    TIED_KEYS,
    GptFamily,
    divide_by_layer,
    double_heads,
    write_scales,
)
from polyformer.models.checkpoints.families.shared_tasks import QUESTION_ANSWERING
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.key_mapping import layered, transposed
from polyformer.models.presets import model_config
from polyformer.nn.heads import EmbedConfig, LanguageModelConfig, TagConfig

LAYER = {
    "ln_1": "block.norms.0",
    "attn.c_attn": transposed("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": transposed("attention.output"),
    "ln_2": "block.norms.1",
    "mlp.c_fc": transposed("feedforward.up"),
    "mlp.c_proj": transposed("feedforward.down"),
}
TRUNK = {
    "wte": "tokens",
    "wpe": "decoder.position.tables.0",
    **layered("h.{i}", "decoder.layers.{i}", LAYER),
    "ln_f": "decoder.final_norm",
}
OPTIONS = (
    option("vocab_size", 50257, "vocab_size"),
    option("n_embd", 768, "hidden_size"),
    option("n_positions", 1024, "max_position_embeddings"),
    option("n_layer", 12, "decoder.num_hidden_layers"),
    option("n_head", 12, "decoder.attention.num_attention_heads"),
    activation("activation_function", "gelu_new", "decoder.feedforward.activation"),
    option("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    option("initializer_range", 0.02, "initializer_range"),
    choice("scale_attn_weights", True, {True: None, False: 1.0}, f"{MECHANISM}.scale"),
    option("n_inner", None, "decoder.feedforward.intermediate_size"),
    *DROPOUTS,
    *SPECIAL,
)
TAG_OPTIONS = (
    Option("classifier_dropout", None, ("dropout",), lambda value: 0.1 if value is None else value),
)


@register
class Gpt2(GptFamily):
    """A pre-norm decoder, the basis of most later decoders."""

    model_type = "gpt2"
    class_prefix = "GPT2"
    paper = "Radford et al. 2019"
    objective = "causal language modelling"
    template = model_config("gpt2")
    config_mapping = OPTIONS
    required: ClassVar = {"add_cross_attention": False}
    other_options = ("scale_attn_by_inverse_layer_idx",)
    ignored_options = ("reorder_and_upcast_attn", "use_cache", *SUMMARY_OPTIONS)
    key_mapping = TRUNK
    ignored_keys = BUFFERS
    tasks: ClassVar = {
        "LMHeadModel": Task(LanguageModelConfig(), {"lm_head": "head"}, tied_keys=TIED_KEYS),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(LAST_TOKEN, {"score": "head.output"}),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}, TAG_OPTIONS),
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "DoubleHeadsModel": double_heads(TIED_KEYS),
    }
    sizes = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set also the division of scores by the layer number."""
        super().read_other_options(tree, hub)
        if hub.get("scale_attn_by_inverse_layer_idx"):
            divide_by_layer(tree)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the options of the scores' scale."""
        return {**super().write_other_options(tree), **write_scales(tree)}
