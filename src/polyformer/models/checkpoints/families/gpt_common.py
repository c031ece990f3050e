"""The common tables of GPT, GPT-2 and the models that follow them."""

from typing import Any, ClassVar

from polyformer.models.checkpoints.config_mapping import Tree, get_path, option
from polyformer.models.checkpoints.family import Family, Task
from polyformer.nn.heads import ChooseConfig, ClassifyConfig, LanguageModelConfig, PretrainingConfig

MECHANISM = "decoder.attention.mechanism"
DROPOUTS = (
    option("resid_pdrop", 0.1, "decoder.dropout"),
    option("embd_pdrop", 0.1, "embedding.embedding_dropout"),
    option("attn_pdrop", 0.1, f"{MECHANISM}.dropout"),
)
SPECIAL = (
    option("pad_token_id", None, "special.pad"),
    option("bos_token_id", 50256, "special.bos"),
    option("eos_token_id", 50256, "special.eos"),
    option("tie_word_embeddings", True, "embedding.tied"),
)
SUMMARY = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_proj_to_labels": True,
    "summary_last_dropout": 0,
}
"""Options of the class with two heads, each with the value that makes a score of a text."""

SUMMARY_OPTIONS = (*SUMMARY, "summary_first_dropout")
"""The options of `SUMMARY` and another, which have no effect in other classes."""

BUFFERS = ("*.attn.bias", "*.attn.masked_bias")
"""Causal masks, which old files contain."""

TIED_KEYS = {"lm_head.weight": "transformer.wte.weight"}
LAST_TOKEN = ClassifyConfig(pooling="last", hidden=False, bias=False, dropout=0.0)


def double_heads(tied_keys: dict[str, str]) -> Task:
    """Return the class that predicts tokens and chooses among texts, by one number at one token of each."""
    text = ClassifyConfig(num_labels=1, pooling="last", hidden=False)
    return Task(
        PretrainingConfig(tokens=LanguageModelConfig(), sentence=ChooseConfig(text=text)),
        {"lm_head": "head.tokens", "multiple_choice_head.summary": "head.sentence.text.output"},
        (option("summary_first_dropout", 0.1, "sentence.text.dropout"),),
        tied_keys,
        labelled=False,
        required=SUMMARY,
    )


class GptFamily(Family):
    """The base class of GPT families. embedding_dropout: the option of the dropout on the embeddings."""

    base_model_prefix = "transformer"
    aliases: ClassVar = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    embedding_dropout: ClassVar[str] = "embd_pdrop"

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the inner width, by default four times the model's.

        A dropout on the embeddings that equals the stack's requires no option here.
        """
        stack, embedding = tree["decoder"], tree["embedding"]
        if stack["feedforward"]["intermediate_size"] is None:
            stack["feedforward"]["intermediate_size"] = 4 * tree["hidden_size"]
        if embedding["embedding_dropout"] == stack["dropout"]:
            embedding["embedding_dropout"] = None

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the dropout on the embeddings."""
        dropout = get_path(tree, "embedding.embedding_dropout")
        return {self.embedding_dropout: get_path(tree, "decoder.dropout") if dropout is None else dropout}


def divide_by_layer(tree: Tree) -> None:
    """Divide the scores of layer i (from 0) by i + 1, with a mechanism for each layer."""
    attention = tree["decoder"]["attention"]
    mechanism = attention["mechanism"]
    scale = mechanism["scale"] or _scale(tree)
    attention["mechanism"] = {
        "kind": "alternate",
        "mechanisms": [
            {**mechanism, "scale": scale / (i + 1)} for i in range(tree["decoder"]["num_hidden_layers"])
        ],
    }


def write_scales(tree: Tree) -> Tree:
    """Return the options of a `tree` whose scores may be divided by the layer number."""
    mechanism = get_path(tree, MECHANISM) or {}
    if mechanism.get("kind") != "alternate":
        return {"scale_attn_by_inverse_layer_idx": False}
    first: dict[str, Any] = mechanism["mechanisms"][0]
    return {
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": first.get("scale") == _scale(tree),
        "attn_pdrop": first.get("dropout"),
    }


def _scale(tree: Tree) -> float:
    """Return 1 / sqrt(D)."""
    return (tree["hidden_size"] // tree["decoder"]["attention"]["num_attention_heads"]) ** -0.5
