"""GPT-Neo: GPT-2 whose layers see the whole text or a window, with unscaled scores. Black et al. 2021."""

from typing import ClassVar

from polyformer.attention import SoftmaxConfig
from polyformer.checkpoints.families.gpt2 import COPIES, LAST, MECHANISM, SPECIAL, embedding_dropout, settle
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, act, field, look_up
from polyformer.checkpoints.names import layered
from polyformer.core.errors import InputError, unknown
from polyformer.heads import EmbedConfig, LanguageModelConfig, SpanConfig, TagConfig
from polyformer.patterns import PerLayer, Window
from polyformer.patterns.implied import Full
from polyformer.presets import model_config

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
FIELDS = (
    field("vocab_size", 50257, "vocab_size"),
    field("hidden_size", 2048, "hidden_size"),
    field("max_position_embeddings", 2048, "max_position_embeddings"),
    field("num_layers", 24, "decoder.num_hidden_layers"),
    field("num_heads", 16, "decoder.attention.num_attention_heads"),
    field("intermediate_size", None, "decoder.feedforward.intermediate_size"),
    act("activation_function", "gelu_new", "decoder.feedforward.activation"),
    field("resid_dropout", 0.0, "decoder.dropout"),
    field("embed_dropout", 0.0, "embedding.embedding_dropout"),
    field("attention_dropout", 0.0, f"{MECHANISM}.dropout"),
    field("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    field("initializer_range", 0.02, "initializer_range"),
    *SPECIAL,
)
KINDS = ("global", "local")


@register
class GptNeo(Family):
    """A local layer sees `window_size` tokens, the query's own among them, in every backend."""

    model_type = "gpt_neo"
    classes = "GPTNeo"
    paper = "Black et al. 2021"
    objective = "causal language modelling"
    base = "transformer"
    template = model_config("gpt-neo-1.3b")
    fields = FIELDS
    aliases: ClassVar = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    adjusted = ("attention_types", "attention_layers", "window_size")
    inert = ("use_cache",)
    names: ClassVar = {
        "wte": "tokens",
        "wpe": "decoder.position.tables.0",
        **layered("h.{i}", "decoder.layers.{i}", LAYER),
        "ln_f": "decoder.final_norm",
    }
    ignored = ("*.attn.attention.bias", "*.attn.attention.masked_bias")
    tasks: ClassVar = {
        "ForCausalLM": Task(LanguageModelConfig(), {"lm_head": "head"}, copies=COPIES),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), base=False),
        "ForSequenceClassification": Task(LAST, {"score": "head.output"}),
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (field("classifier_dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnswering": Task(SpanConfig(), {"qa_outputs": "head.output"}),
    }
    sizes = ("gpt-neo-125m", "gpt-neo-1.3b", "gpt-neo-2.7b")

    def check(self, hub: Tree) -> None:
        kinds, layers = _kinds(hub), hub.get("num_layers", 24)
        for kind in kinds:
            if kind not in KINDS:
                raise unknown("attention_types", str(kind), KINDS)
        if len(kinds) != layers:
            raise InputError(f"config.json: attention_types has {len(kinds)} layers, and num_layers {layers}")
        if "local" in kinds and hub.get("window_size", 256) < 2:
            raise InputError(f"config.json: window_size is {hub['window_size']}; expected 2 or more")

    def adjust(self, tree: Tree, hub: Tree) -> None:
        settle(tree)
        each = {"global": Full(), "local": Window(max(hub.get("window_size", 256) - 1, 1), 0)}
        turns = tuple(each[kind] for kind in _period(_kinds(hub)))
        pattern = turns[0] if len(turns) == 1 else PerLayer(turns)
        config = SoftmaxConfig(pattern=None if turns == (Full(),) else pattern)
        tree["decoder"]["attention"]["mechanism"]["pattern"] = config.to_dict()["pattern"]

    def describe(self, tree: Tree) -> Tree:
        mechanism = look_up(tree, MECHANISM) or {}
        if mechanism.get("kind") != "softmax":
            return {}
        config = SoftmaxConfig.from_dict(mechanism)
        turns = [config.at(layer).pattern for layer in range(tree["decoder"]["num_hidden_layers"])]
        kinds = ["local" if isinstance(one, Window) else "global" for one in turns]
        windows = [one.before + 1 for one in turns if isinstance(one, Window)]
        return {
            "attention_types": [[kinds, 1]],
            "attention_layers": kinds,
            "embed_dropout": embedding_dropout(tree),
            "window_size": windows[0] if windows else 256,
        }


def _kinds(hub: Tree) -> list[str]:
    """What each layer sees: the list that transformers writes out, or else the one that it is made of."""
    if hub.get("attention_layers") is not None:
        return hub["attention_layers"]
    types = hub.get("attention_types") or [[["global", "local"], 12]]
    return [kind for kinds, times in types for _ in range(times) for kind in kinds]


def _period(kinds: list[str]) -> list[str]:
    """The shortest beginning that all layers repeat."""
    lengths = range(1, len(kinds) + 1)
    turn = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return kinds[:turn]
