"""GPT-Neo and GPT-J, which follow GPT-2. Black et al. 2021; Wang and Komatsuzaki 2021."""

import math
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Tree, get_path, option
from polyformer.models.checkpoints.families.common import LAST_TOKEN, QUESTION_ANSWERING, SCORED
from polyformer.models.checkpoints.families.gpt import BUFFERS, TABLES, TIED_KEYS, GptFamily
from polyformer.models.checkpoints.families.window_layers import check_kinds, get_windows, set_windows
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.values import options, special
from polyformer.models.presets import model_config
from polyformer.nn.heads import LanguageModelConfig, TagConfig


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
        check_kinds("attention_types", _kinds(hub), ("global", "local"), "num_layers", hub)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern of every layer too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [hub["window_size"] if kind == "local" else None for kind in _kinds(hub)])

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


def _kinds(hub: Tree) -> list[str]:
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
