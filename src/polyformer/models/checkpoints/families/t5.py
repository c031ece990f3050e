"""T5, versions 1.0 and 1.1: encoder-decoder with buckets of distances. Raffel et al. 2020.

The first layer of each stack has the table of distances that all its layers read. In version 1.1
`tie_word_embeddings` is false, which means that the output layer is untied and its inputs are not scaled;
files of transformers 5 have `scale_decoder_outputs` instead.
"""

from typing import ClassVar

from polyformer.core.errors import unknown
from polyformer.models.checkpoints.config_mapping import ACTIVATIONS, Tree, option, with_defaults
from polyformer.models.checkpoints.families.bart import stack_tables
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.checkpoints.values import options
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import DenseConfig, GatedConfig
from polyformer.nn.heads import (
    ClassifyConfig,
    EmbedConfig,
    HeadConfig,
    LanguageModelConfig,
    SpanConfig,
    TagConfig,
)

SELF = {
    "layer.0.SelfAttention.[q|k|v|o]": "attention.[query|key|value|output]",
    "layer.0.layer_norm": "block.norms.0",
}
CROSS = {
    "layer.1.EncDecAttention.[q|k|v|o]": "cross_attention.[query|key|value|output]",
    "layer.1.layer_norm": "block.norms.1",
}
DROPOUTS = ("dropout", "final_dropout", "feedforward.inner_dropout", "attention.mechanism.dropout")
TABLE = "layer.0.SelfAttention.relative_attention_bias"


def _feedforward(place: int) -> dict[str, str]:
    """Return both kinds of feed-forward layers, as sub-layer number `place`."""
    return {
        # wi of the first version, wi_0 and wi_1 of version 1.1
        f"layer.{place}.DenseReluDense.[wi|wi_0|wi_1|wo]": "feedforward.[up|gate|up|down]",
        f"layer.{place}.layer_norm": f"block.norms.{place}",
    }


@register
class T5(Family):
    """An encoder-decoder that treats every task as text to text."""

    model_type = "t5"
    class_prefix = "T5"
    paper = "Raffel et al. 2020"
    objective = "span corruption"
    base_model_prefix = "transformer"
    template = model_config("t5-small")
    config_mapping = options(
        "encoder decoder",
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 2048},
        option("num_layers", 6, "encoder.num_hidden_layers"),
        option("num_decoder_layers", None, "decoder.num_hidden_layers"),
        {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
        option(
            "dropout_rate",
            0.1,
            *(f"{stack}.{place}" for place in DROPOUTS for stack in ("encoder", "decoder")),
        ),
        {"layer_norm_epsilon": 1e-6, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True},
        option("decoder_start_token_id", None, "special.bos"),
    )
    aliases: ClassVar = {"head_dim": "d_kv"}
    required: ClassVar = {"is_decoder": False}
    other_options: ClassVar = {"feed_forward_proj": "relu", "dense_act_fn": None, "is_gated_act": None}
    ignored_options = ("is_encoder_decoder", "use_cache", "initializer_factor", "chunk_size_feed_forward")
    # the first layer of each stack has the table for all layers of the stack
    key_mapping: ClassVar = {
        "shared": "tokens",
        f"[encoder|decoder].block.0.{TABLE}": "[encoder|decoder].position.table",
        "[encoder|decoder].final_layer_norm": "[encoder|decoder].final_norm",
        **layered("encoder.block.{i}", "encoder.layers.{i}", {**SELF, **_feedforward(1)}),
        **layered("decoder.block.{i}", "decoder.layers.{i}", {**SELF, **CROSS, **_feedforward(2)}),
    }
    ignored_keys = (
        "*coder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.*",
    )
    head_dropouts = ("classifier_dropout",)
    tasks: ClassVar = {
        "ForConditionalGeneration": Task(
            LanguageModelConfig(),
            {"lm_head.weight": "head.weight"},
            (option("scale_decoder_outputs", True, "scaled"),),
            {"lm_head.weight": "shared.weight", **stack_tables("")},
            prefixed=False,
        ),
        "Model": Task(EmbedConfig(normalize=False), tied_keys=stack_tables(""), prefixed=False),
        "EncoderModel": Task(
            EmbedConfig(normalize=False), tied_keys=stack_tables(""), prefixed=False, without="decoder"
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(dropout=0.0, drops_twice=True),
            {"classification_head.[dense|out_proj]": "head.[dense|output]"},
            (option("eos_token_id", 1, "end_token"),),
            stack_tables("transformer."),
        ),
        "ForTokenClassification": Task(
            TagConfig(dropout=0.0),
            {"classifier": "head.output"},
            tied_keys=stack_tables("transformer."),
            without="decoder",
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, tied_keys=stack_tables(""), prefixed=False
        ),
    }
    sizes = ("t5-small", "t5-base", "t5-large", "t5-v1_1-base")

    def task(self, hub: Tree, head: str | HeadConfig | None) -> str:
        """Return the task; the oldest checkpoints, such as t5-large, have an old class name."""
        if hub.get("architectures") == ["T5WithLMHeadModel"]:
            hub = {**hub, "architectures": ["T5ForConditionalGeneration"]}
        return super().task(hub, head)

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family, with defaults for the options that theirs omits."""
        # Version 1.1 is untied, and its outputs are not scaled by d_model ** -0.5.
        hub = {"scale_decoder_outputs": hub.get("tie_word_embeddings") is not False, **hub}
        if hub.get("decoder_start_token_id") is None:
            hub["decoder_start_token_id"] = hub.get("pad_token_id", 0)
        if hub.get("num_decoder_layers") is None:
            usual = next(option.default for option in self.config_mapping if option.theirs == "num_layers")
            hub["num_decoder_layers"] = hub.get("num_layers", hub.get("num_hidden_layers", usual))
        return super().config(hub, task, head)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the feed-forward layer: "relu" or "gated-gelu", where "gelu" means "gelu_new".

        Newer files have the resolved values in two more options.
        """
        # the authors' code approximates gelu by tanh
        proj = hub["feed_forward_proj"]
        kind, _, name = ("gated", "-", "gelu_new") if proj == "gated-gelu" else proj.rpartition("-")
        gated = kind == "gated" if hub["is_gated_act"] is None else hub["is_gated_act"]
        name = hub["dense_act_fn"] or name
        if name not in ACTIVATIONS or kind not in ("", "gated"):
            known = [*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)]
            raise unknown("feed_forward_proj", proj, known)
        config = (GatedConfig if gated else DenseConfig)(activation=ACTIVATIONS[name], bias=False)
        for side in ("encoder", "decoder"):
            old = tree[side]["feedforward"]
            kept = {option: old[option] for option in ("intermediate_size", "inner_dropout")}
            tree[side]["feedforward"] = {**config.to_dict(), **kept}

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the three options of the feed-forward layer."""
        feedforward = tree["encoder"]["feedforward"]
        gated = feedforward["kind"] == "gated"
        name = next(
            (theirs for theirs, ours in ACTIVATIONS.items() if ours == feedforward.get("activation")), None
        )
        proj = "gelu" if gated and name == "gelu_new" else name
        return {
            "feed_forward_proj": f"gated-{proj}" if gated else proj,
            "dense_act_fn": name,
            "is_gated_act": gated,
        }

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether a tensor is of the model's kind of feed-forward layer."""
        assert config.encoder is not None
        other = ".wi." if config.encoder.feedforward.kind == "gated" else ".wi_1."
        return other not in theirs


@register
class MT5(T5):
    """T5 1.1 for a hundred languages, with a vocabulary of 250 thousand pieces."""

    model_type = "mt5"
    class_prefix = "MT5"
    paper = "Xue et al. 2021"
    objective = "span corruption in 101 languages"
    claims = False
    template = model_config("t5-v1_1-base")
    config_mapping = with_defaults(
        T5.config_mapping,
        {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "decoder_start_token_id": 0},
    )
    other_options: ClassVar = {**T5.other_options, "feed_forward_proj": "gated-gelu"}
    ignored_options = (*T5.ignored_options, "bos_token_id")
    sizes = ()

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for T5; outputs are never scaled."""
        return super().config({**hub, "scale_decoder_outputs": False}, task, head)
