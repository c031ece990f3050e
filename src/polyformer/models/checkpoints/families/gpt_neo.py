"""GPT-Neo: GPT-2 with layers of full and of windowed attention and unscaled scores. Black et al. 2021."""

from typing import ClassVar

from polyformer.core.errors import InputError, unknown
from polyformer.models.checkpoints.config_mapping import Tree, activation, option
from polyformer.models.checkpoints.families.gpt_common import (
    LAST_TOKEN,
    MECHANISM,
    SPECIAL,
    TIED_KEYS,
    GptFamily,
)
from polyformer.models.checkpoints.families.shared_tasks import QUESTION_ANSWERING
from polyformer.models.checkpoints.families.window_layers import get_windows, set_windows
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import EmbedConfig, LanguageModelConfig, TagConfig

LAYER = {
    "ln_1": "block.norms.0",
    "attn.attention.q_proj": "attention.query",
    "attn.attention.k_proj": "attention.key",
    "attn.attention.v_proj": "attention.value",
    "attn.attention.out_proj": "attention.output",
    "ln_2": "block.norms.1",
    "mlp.c_fc": "feedforward.up",
    "mlp.c_proj": "feedforward.down",
}
OPTIONS = (
    option("vocab_size", 50257, "vocab_size"),
    option("hidden_size", 2048, "hidden_size"),
    option("max_position_embeddings", 2048, "max_position_embeddings"),
    option("num_layers", 24, "decoder.num_hidden_layers"),
    option("num_heads", 16, "decoder.attention.num_attention_heads"),
    option("intermediate_size", None, "decoder.feedforward.intermediate_size"),
    activation("activation_function", "gelu_new", "decoder.feedforward.activation"),
    option("resid_dropout", 0.0, "decoder.dropout"),
    option("embed_dropout", 0.0, "embedding.embedding_dropout"),
    option("attention_dropout", 0.0, f"{MECHANISM}.dropout"),
    option("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    option("initializer_range", 0.02, "initializer_range"),
    *SPECIAL,
)
KINDS = ("global", "local")


@register
class GptNeo(GptFamily):
    """A decoder with local layers that attend to `window_size` tokens, the query's included, in every
    backend.
    """

    model_type = "gpt_neo"
    class_prefix = "GPTNeo"
    paper = "Black et al. 2021"
    objective = "causal language modelling"
    template = model_config("gpt-neo-1.3b")
    config_mapping = OPTIONS
    aliases: ClassVar = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    embedding_dropout = "embed_dropout"
    other_options = ("attention_types", "attention_layers", "window_size")
    ignored_options = ("use_cache",)
    key_mapping: ClassVar = {
        "wte": "tokens",
        "wpe": "decoder.position.tables.0",
        **layered("h.{i}", "decoder.layers.{i}", LAYER),
        "ln_f": "decoder.final_norm",
    }
    ignored_keys = ("*.attn.attention.bias", "*.attn.attention.masked_bias")
    tasks: ClassVar = {
        "ForCausalLM": Task(LanguageModelConfig(), {"lm_head": "head"}, tied_keys=TIED_KEYS),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(LAST_TOKEN, {"score": "head.output"}),
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (option("classifier_dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnswering": QUESTION_ANSWERING,
    }
    sizes = ("gpt-neo-125m", "gpt-neo-1.3b", "gpt-neo-2.7b")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers and a wrong number of layers."""
        kinds, layers = _kinds(hub), hub.get("num_layers", 24)
        for kind in kinds:
            if kind not in KINDS:
                raise unknown("attention_types", str(kind), KINDS)
        if len(kinds) != layers:
            raise InputError(f"config.json: attention_types has {len(kinds)} layers, and num_layers {layers}")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the pattern of every layer too."""
        super().read_other_options(tree, hub)
        each = {"global": None, "local": hub.get("window_size", 256)}
        set_windows(tree, [each[kind] for kind in _kinds(hub)])

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
    if hub.get("attention_layers") is not None:
        return hub["attention_layers"]
    types = hub.get("attention_types") or [[["global", "local"], 12]]
    return [kind for kinds, times in types for _ in range(times) for kind in kinds]
