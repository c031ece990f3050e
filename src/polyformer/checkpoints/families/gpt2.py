"""GPT-2: pre-norm decoder, learned positions, one matrix for q, k and v. Radford et al. 2019."""

from typing import Any, ClassVar

from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Field, Tree, act, choice, field, look_up
from polyformer.checkpoints.names import layered, transposed
from polyformer.heads import ClassifyConfig, EmbedConfig, LanguageModelConfig, SpanConfig, TagConfig
from polyformer.presets import model_config

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
BUFFERS = ("*.attn.bias", "*.attn.masked_bias")
"""Causal masks, which old files hold."""

MECHANISM = "decoder.attention.mechanism"
SIZES = (
    field("vocab_size", 50257, "vocab_size"),
    field("n_embd", 768, "hidden_size"),
    field("n_positions", 1024, "max_position_embeddings"),
    field("n_layer", 12, "decoder.num_hidden_layers"),
    field("n_head", 12, "decoder.attention.num_attention_heads"),
)
DROPOUTS = (
    field("resid_pdrop", 0.1, "decoder.dropout"),
    field("embd_pdrop", 0.1, "embedding.embedding_dropout"),
    field("attn_pdrop", 0.1, f"{MECHANISM}.dropout"),
)
BLOCK = (
    act("activation_function", "gelu_new", "decoder.feedforward.activation"),
    field("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    field("initializer_range", 0.02, "initializer_range"),
    choice("scale_attn_weights", True, {True: None, False: 1.0}, f"{MECHANISM}.scale"),
    field("n_inner", None, "decoder.feedforward.intermediate_size"),
)
SPECIAL = (
    field("pad_token_id", None, "special.pad"),
    field("bos_token_id", 50256, "special.bos"),
    field("eos_token_id", 50256, "special.eos"),
    field("tie_word_embeddings", True, "embedding.tied"),
)
SUMMARY = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)
"""Options of the class with two heads alone, which is none of ours."""

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
LAST = ClassifyConfig(pooling="last", hidden=False, bias=False, dropout=0.0)
COPIES = {"lm_head.weight": "transformer.wte.weight"}
TAG_FIELDS = (Field("classifier_dropout", None, ("dropout",), lambda value: 0.1 if value is None else value),)


def settle(tree: Tree) -> None:
    """What is meant where nothing is said: an inner width of four times the model's, and, as ours has it, the
    stack's dropout on the embeddings too."""
    stack = tree["decoder"]
    if stack["feedforward"]["intermediate_size"] is None:
        stack["feedforward"]["intermediate_size"] = 4 * tree["hidden_size"]
    if tree["embedding"]["embedding_dropout"] == stack["dropout"]:
        tree["embedding"]["embedding_dropout"] = None


def embedding_dropout(tree: Tree) -> float | None:
    """The dropout on the embeddings, said or not."""
    own = look_up(tree, "embedding.embedding_dropout")
    return look_up(tree, "decoder.dropout") if own is None else own


def divide_by_layer(tree: Tree) -> None:
    """Scores of layer i (from 0) divided by i + 1: a mechanism for each layer."""
    attention = tree["decoder"]["attention"]
    one = attention["mechanism"]
    scale = one["scale"] or _scale(tree)
    attention["mechanism"] = {
        "kind": "alternate",
        "mechanisms": [
            {**one, "scale": scale / (i + 1)} for i in range(tree["decoder"]["num_hidden_layers"])
        ],
    }


def describe_scales(tree: Tree) -> Tree:
    """The options of a `tree` that may have been divided by layer."""
    mechanism = look_up(tree, MECHANISM) or {}
    if mechanism.get("kind") != "alternate":
        return {"scale_attn_by_inverse_layer_idx": False}
    first: dict[str, Any] = mechanism["mechanisms"][0]
    return {
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": first.get("scale") == _scale(tree),
        "attn_pdrop": first.get("dropout"),
    }


def _scale(tree: Tree) -> float:
    return (tree["hidden_size"] // tree["decoder"]["attention"]["num_attention_heads"]) ** -0.5


@register
class Gpt2(Family):
    """The decoder that most others are made of."""

    model_type = "gpt2"
    classes = "GPT2"
    paper = "Radford et al. 2019"
    objective = "causal language modelling"
    base = "transformer"
    template = model_config("gpt2")
    fields = (*SIZES, *BLOCK, *DROPOUTS, *SPECIAL)
    aliases: ClassVar = ALIASES
    fixed: ClassVar = {"add_cross_attention": False}
    adjusted = ("scale_attn_by_inverse_layer_idx",)
    inert = ("reorder_and_upcast_attn", "use_cache", *SUMMARY)
    names = TRUNK
    ignored = BUFFERS
    tasks: ClassVar = {
        "LMHeadModel": Task(LanguageModelConfig(), {"lm_head": "head"}, copies=COPIES),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), base=False),
        "ForSequenceClassification": Task(LAST, {"score": "head.output"}),
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}, TAG_FIELDS),
        "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}),
    }
    sizes = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

    def adjust(self, tree: Tree, hub: Tree) -> None:
        settle(tree)
        if hub.get("scale_attn_by_inverse_layer_idx"):
            divide_by_layer(tree)

    def describe(self, tree: Tree) -> Tree:
        return {"embd_pdrop": embedding_dropout(tree), **describe_scales(tree)}
