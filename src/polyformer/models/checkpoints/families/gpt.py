"""GPT, GPT-2 and CTRL, and GPT-BigCode, GPT-Neo and GPT-J, which follow GPT-2.

Radford et al. 2018 and 2019; Keskar et al. 2019; Ben Allal et al. 2023; Black et al. 2021; Wang and
Komatsuzaki 2021.
"""

import math
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Tree, choice, get_path, option, with_defaults
from polyformer.models.checkpoints.families.common import (
    LAST_TOKEN,
    LAST_TOKEN_SCORES,
    QUESTION_ANSWERING,
    SCORED,
    TAG_DROPOUT,
)
from polyformer.models.checkpoints.families.layers import (
    check_kinds,
    divide_by_layer,
    get_windows,
    set_windows,
    write_scales,
)
from polyformer.models.checkpoints.families.open_decoders import FUSED
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered, transposed
from polyformer.models.checkpoints.values import options, special
from polyformer.models.presets import model_config
from polyformer.nn.heads import (
    ChooseConfig,
    ClassifyConfig,
    LanguageModelConfig,
    PretrainingConfig,
    TagConfig,
)

MECHANISM = "decoder.attention.mechanism"
SCALE = choice("scale_attn_weights", True, {True: None, False: 1.0}, f"{MECHANISM}.scale")

# Options of the class with two heads, each with the value that makes a score of a text.
SUMMARY = {
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_proj_to_labels": True,
    "summary_last_dropout": 0,
}

SUMMARY_OPTIONS = (*SUMMARY, "summary_first_dropout")

# Causal masks, which old files contain.
BUFFERS = ("*.attn.bias", "*.attn.masked_bias")

TIED_KEYS = {"lm_head.weight": "transformer.wte.weight"}

LAYER = {
    "ln_[1|2]": "block.norms.[0|1]",
    "attn.c_attn": transposed("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": transposed("attention.output"),
    "mlp.c_fc": transposed("feedforward.up"),
    "mlp.c_proj": transposed("feedforward.down"),
}
TABLES = {"wte": "tokens", "wpe": "decoder.position.tables.0", "ln_f": "decoder.final_norm"}


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

    objective = "causal language modelling"
    base_model_prefix = "transformer"
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


@register
class Gpt(GptFamily):
    """A decoder with a feed-forward layer that is always four times as wide as the model."""

    model_type = "openai-gpt"
    class_prefix = "OpenAIGPT"
    paper = "Radford et al. 2018"
    template = model_config("gpt")
    config_mapping = options(
        "decoder",
        {"vocab_size": 40478, "n_embd": 768, "n_positions": 512, "n_layer": 12, "n_head": 12},
        # GPT's "gelu" is the approximation by tanh, in every other family the exact function
        choice(
            "afn",
            "gelu",
            {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
            "decoder.feedforward.activation",
        ),
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, **special()},
    )
    ignored_options = SUMMARY_OPTIONS
    # post-norm, so there is no norm at the end
    key_mapping: ClassVar = {
        "tokens_embed": "tokens",
        "positions_embed": "decoder.position.tables.0",
        **layered("h.{i}", "decoder.layers.{i}", LAYER),
    }
    ignored_keys = (*BUFFERS, "*position_ids")
    tied_keys: ClassVar = {"lm_head.weight": "transformer.tokens_embed.weight"}
    tasks: ClassVar = {
        "LMHeadModel": Task(LanguageModelConfig(), {"lm_head": "head"}, tied_keys=tied_keys),
        "Model": LAST_TOKEN,
        "ForSequenceClassification": SCORED,
        "DoubleHeadsModel": double_heads(tied_keys),
    }
    sizes = ("gpt",)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the inner width, which is not an option."""
        tree["decoder"]["feedforward"]["intermediate_size"] = None
        super().read_other_options(tree, hub)


@register
class Gpt2(GptFamily):
    """A pre-norm decoder, the basis of most later decoders."""

    model_type = "gpt2"
    class_prefix = "GPT2"
    paper = "Radford et al. 2019"
    template = model_config("gpt2")
    config_mapping = options(
        "decoder",
        {"vocab_size": 50257, "n_embd": 768, "n_positions": 1024, "n_layer": 12, "n_head": 12},
        {"n_inner": None, "activation_function": "gelu_new"},
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, **special(None, 50256, 50256)},
        SCALE,
    )
    required: ClassVar = {"add_cross_attention": False}
    other_options: ClassVar = {"scale_attn_by_inverse_layer_idx": False}
    ignored_options = ("reorder_and_upcast_attn", "use_cache", *SUMMARY_OPTIONS)
    key_mapping: ClassVar = {**TABLES, **layered("h.{i}", "decoder.layers.{i}", LAYER)}
    ignored_keys = BUFFERS
    tasks: ClassVar = {
        "LMHeadModel": Task(LanguageModelConfig(), {"lm_head": "head"}, tied_keys=TIED_KEYS),
        "Model": LAST_TOKEN,
        "ForSequenceClassification": SCORED,
        "ForTokenClassification": Task(TagConfig(), {"classifier": "head.output"}, (TAG_DROPOUT,)),
        "ForQuestionAnswering": QUESTION_ANSWERING,
        "DoubleHeadsModel": double_heads(TIED_KEYS),
    }
    sizes = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set also the division of scores by the layer number."""
        super().read_other_options(tree, hub)
        if hub["scale_attn_by_inverse_layer_idx"]:
            divide_by_layer(tree)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the options of the scores' scale."""
        return {**super().write_other_options(tree), **write_scales(tree)}


@register
class GptBigCode(GptFamily):
    """GPT-2 with one head of keys and values for all queries, or one for each: SantaCoder and StarCoder."""

    model_type = "gpt_bigcode"
    class_prefix = "GPTBigCode"
    paper = "Ben Allal et al. 2023"
    template = model_config("gpt2")
    config_mapping = with_defaults(Gpt2.config_mapping, {"activation_function": "gelu_pytorch_tanh"})
    required: ClassVar = {"add_cross_attention": False}
    other_options: ClassVar = {"multi_query": True}
    ignored_options = (
        *("use_cache", "num_key_value_heads"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    )
    key_mapping: ClassVar = {
        **TABLES,
        "h.{i}.ln_[1|2]": "decoder.layers.{i}.block.norms.[0|1]",
        "h.{i}.attn.c_attn": FUSED,
        "h.{i}.attn.c_proj": "decoder.layers.{i}.attention.output",
        "h.{i}.mlp.[c_fc|c_proj]": "decoder.layers.{i}.feedforward.[up|down]",
    }
    ignored_keys = BUFFERS
    tasks: ClassVar = {
        "ForCausalLM": Gpt2.tasks["LMHeadModel"],
        **{
            name: Gpt2.tasks[name]
            for name in ("Model", "ForSequenceClassification", "ForTokenClassification")
        },
    }

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set also the number of key heads."""
        super().read_other_options(tree, hub)
        tree["decoder"]["attention"]["num_key_value_heads"] = 1 if hub["multi_query"] else None

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also whether there is one key head."""
        heads = get_path(tree, "decoder.attention.num_key_value_heads")
        return {**super().write_other_options(tree), "multi_query": heads == 1}


@register
class Ctrl(GptFamily):
    """A pre-norm decoder with sinusoids and scaled embeddings; its texts begin with a control code, a token
    like any other.

    The norm epsilon of its layers is fixed, 1e-6; the option must give the last norm the same.
    """

    model_type = "ctrl"
    class_prefix = "CTRL"
    paper = "Keskar et al. 2019"
    objective = "causal language modelling after a control code"
    template = model_config("ctrl")
    config_mapping = options(
        "decoder",
        {"vocab_size": 246534, "n_embd": 1280, "n_positions": 256, "n_layer": 48, "n_head": 16, "dff": 8192},
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02, **special()},
    )
    required: ClassVar = {"layer_norm_epsilon": 1e-6}
    ignored_options = ("use_cache", "attn_pdrop")
    key_mapping: ClassVar = {
        "w": "tokens",
        **layered(
            "h.{i}",
            "decoder.layers.{i}",
            {
                "multi_head_attention.[Wq|Wk|Wv|dense]": "attention.[query|key|value|output]",
                "ffn.[0|2]": "feedforward.[up|down]",  # 1 is the activation
                "layernorm[1|2]": "block.norms.[0|1]",
            },
        ),
        "layernorm": "decoder.final_norm",
    }
    ignored_keys = ("*pos_encoding",)
    tasks: ClassVar = {
        "LMHeadModel": Task(
            LanguageModelConfig(bias=True),
            {"lm_head": "head"},
            tied_keys={"lm_head.weight": "transformer.w.weight"},
        ),
        "Model": LAST_TOKEN,
        "ForSequenceClassification": Task(LAST_TOKEN_SCORES, {"classifier": "head.output"}),
    }
    sizes = ("ctrl",)


@register
class GptNeo(GptFamily):
    """A decoder with local layers of `window_size` tokens, the query's included, in every backend."""

    model_type = "gpt_neo"
    class_prefix = "GPTNeo"
    paper = "Black et al. 2021"
    template = model_config("gpt-neo-1.3b")
    config_mapping = options(
        "decoder",
        {"vocab_size": 50257, "hidden_size": 2048, "max_position_embeddings": 2048},
        {"num_layers": 24, "num_heads": 16, "intermediate_size": None, "activation_function": "gelu_new"},
        {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
        {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, **special(None, 50256, 50256)},
    )
    embedding_dropout = "embed_dropout"
    other_options: ClassVar = {
        "attention_types": [[["global", "local"], 12]],
        "attention_layers": None,
        "window_size": 256,
    }
    ignored_options = ("use_cache",)
    # The template has scale 1: GPT-Neo does not divide scores by sqrt(D).
    key_mapping: ClassVar = {
        **TABLES,
        "h.{i}.ln_[1|2]": "decoder.layers.{i}.block.norms.[0|1]",
        "h.{i}.attn.attention.[q|k|v|out]_proj": "decoder.layers.{i}.attention.[query|key|value|output]",
        "h.{i}.mlp.[c_fc|c_proj]": "decoder.layers.{i}.feedforward.[up|down]",
    }
    ignored_keys = ("*.attn.attention.bias", "*.attn.attention.masked_bias")
    tasks: ClassVar = {
        "ForCausalLM": Task(LanguageModelConfig(), {"lm_head": "head"}, tied_keys=TIED_KEYS),
        "Model": LAST_TOKEN,
        "ForSequenceClassification": SCORED,
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (option("classifier_dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnswering": QUESTION_ANSWERING,
    }
    sizes = ("gpt-neo-125m", "gpt-neo-1.3b", "gpt-neo-2.7b")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers and a wrong number of layers."""
        check_kinds("attention_types", _neo_kinds(hub), ("global", "local"), "num_layers", hub)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern of every layer too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [hub["window_size"] if kind == "local" else None for kind in _neo_kinds(hub)])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the kinds of all layers and their window too."""
        windows = get_windows(tree)
        if windows is None:
            return {}
        kinds = ["global" if window is None else "local" for window in windows]
        return {
            **super().write_other_options(tree),
            "attention_types": [[kinds, 1]],
            "attention_layers": kinds,
            "window_size": next(filter(None, windows), 256),
        }


def _neo_kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from transformers' list, or else from the pairs that define it."""
    if hub["attention_layers"] is not None:
        return hub["attention_layers"]
    types = hub["attention_types"] or GptNeo.other_options["attention_types"]
    return [kind for kinds, times in types for _ in range(times) for kind in kinds]


@register
class GptJ(GptFamily):
    """A decoder with attention parallel to the feed-forward, and `rotary_dim` rotated channels in pairs."""

    model_type = "gptj"
    class_prefix = "GPTJ"
    paper = "Wang and Komatsuzaki 2021"
    template = model_config("gpt-j-6b")
    config_mapping = options(
        "decoder",
        {"vocab_size": 50400, "n_embd": 4096, "n_positions": 2048, "n_layer": 28, "n_head": 16},
        {"n_inner": None, "activation_function": "gelu_new"},
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, **special(None, 50256, 50256, tied=False)},
    )
    other_options: ClassVar = {"rotary_dim": 64}
    ignored_options = ("use_cache",)
    # a single norm, for attention and feed-forward layer
    key_mapping: ClassVar = {
        "wte": "tokens",
        "h.{i}.ln_1": "decoder.layers.{i}.block.norms.0",
        "h.{i}.attn.[q|k|v|out]_proj": "decoder.layers.{i}.attention.[query|key|value|output]",
        "h.{i}.mlp.fc_[in|out]": "decoder.layers.{i}.feedforward.[up|down]",
        "ln_f": "decoder.final_norm",
    }
    ignored_keys = (*BUFFERS, "*.attn.embed_positions")
    tasks: ClassVar = {
        "ForCausalLM": Task(LanguageModelConfig(bias=True), {"lm_head": "head"}, tied_keys=TIED_KEYS),
        "Model": LAST_TOKEN,
        "ForSequenceClassification": SCORED,
        "ForQuestionAnswering": QUESTION_ANSWERING,
    }
    sizes = ("gpt-j-6b",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` unless the number of rotated channels is even, above 0 and within a head."""
        width, rotary_dim = hub["n_embd"] // hub["n_head"], hub["rotary_dim"]
        if rotary_dim is None or not 2 <= rotary_dim <= width or rotary_dim % 2:
            raise InputError(
                f"config.json: rotary_dim is {rotary_dim}; expected an even number up to {width}, "
                f"the width of a head"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set also the fraction of a head that is rotated."""
        super().read_other_options(tree, hub)
        tree["decoder"]["position"]["fraction"] = rotary_fraction(hub["rotary_dim"], _head_size(tree))

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the number of rotated channels."""
        fraction = get_path(tree, "decoder.position.fraction")
        if fraction is None:
            return {}
        return {**super().write_other_options(tree), "rotary_dim": int(_head_size(tree) * fraction)}


def rotary_fraction(rotary_dim: int, head_size: int) -> float:
    """Return the fraction of a head that gives `rotary_dim` channels again after rounding down."""
    # In floating point the product may end just below the integer.
    fraction = rotary_dim / head_size
    return fraction if int(head_size * fraction) == rotary_dim else math.nextafter(fraction, 1)


def _head_size(tree: Tree) -> int:
    return tree["hidden_size"] // tree["decoder"]["attention"]["num_attention_heads"]
