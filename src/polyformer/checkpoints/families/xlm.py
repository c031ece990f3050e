"""XLM: one post-norm stack for many languages, each with a vector of its own. Conneau and Lample 2019.

With `causal` it is a decoder alone. Two things are not as in transformers: what is real is said by the
attention_mask alone (`lengths` is not taken), and a causal model does not see padding, on whichever side.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Field, Tree, check_fixed, field, write_fields
from polyformer.checkpoints.names import Link
from polyformer.heads import ClassifyConfig, EmbedConfig, LanguageModelConfig, SpanConfig, TagConfig
from polyformer.presets import model_config

LAYER = {
    "attentions.{i}.q_lin": "attention.query",
    "attentions.{i}.k_lin": "attention.key",
    "attentions.{i}.v_lin": "attention.value",
    "attentions.{i}.out_lin": "attention.output",
    "layer_norm1.{i}": "block.norms.0",
    "ffns.{i}.lin1": "feedforward.up",
    "ffns.{i}.lin2": "feedforward.down",
    "layer_norm2.{i}": "block.norms.1",
}
SUMMARY = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_proj_to_labels": True,
}
"""What a head that classifies texts must be."""


@register
class Xlm(Family):
    """Names below are those of an encoder; `links` moves them where the model is causal."""

    model_type = "xlm"
    classes = "XLM"
    paper = "Conneau and Lample 2019"
    objective = "causal, masked and translation language modelling"
    base = "transformer"
    template = model_config("xlm-mlm-en-2048")
    fields = (
        field("vocab_size", 30145, "vocab_size"),
        field("emb_dim", 2048, "hidden_size"),
        field("max_position_embeddings", 512, "max_position_embeddings"),
        field("n_layers", 12, "encoder.num_hidden_layers"),
        field("n_heads", 16, "encoder.attention.num_attention_heads"),
        Field(
            "gelu_activation",
            True,
            ("encoder.feedforward.activation",),
            lambda gelu: "gelu" if gelu else "relu",
            lambda name: name == "gelu",
        ),
        field("dropout", 0.1, "encoder.dropout"),
        field("attention_dropout", 0.1, "encoder.attention.mechanism.dropout"),
        field("layer_norm_eps", 1e-12, "encoder.norm.eps"),
        field("init_std", 0.02, "initializer_range"),
        field("pad_token_id", 2, "special.pad"),
        field("bos_token_id", 0, "special.bos"),
        field("eos_token_id", 1, "special.eos"),
        field("tie_word_embeddings", True, "embedding.tied"),
    )
    aliases: ClassVar = {
        "hidden_size": "emb_dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "n_words": "vocab_size",
        "bos_index": "bos_token_id",
        "eos_index": "eos_token_id",
        "pad_index": "pad_token_id",
    }
    fixed: ClassVar = {"asm": False, "is_encoder": True}
    adjusted = ("causal", "use_lang_emb")
    # n_langs counts vectors where use_lang_emb says so and is a name otherwise; the tables that two options
    # fill at first are in the file; other heads and `generate` have the rest
    inert = (
        "n_langs",
        "sinusoidal_embeddings",
        "embed_init_std",
        "unk_index",
        "mask_index",
        "mask_token_id",
        "lang_id",
        "start_n_top",
        "end_n_top",
        *SUMMARY,
        "summary_first_dropout",
    )
    names: ClassVar = {
        "embeddings": "tokens",
        "position_embeddings": "encoder.position.tables.0",
        "lang_embeddings": "encoder_embedding.languages",
        "layer_norm_emb": "encoder_embedding.norm",
        **{theirs: f"encoder.layers.{{i}}.{ours}" for theirs, ours in LAYER.items()},
    }
    ignored = ("*position_ids",)
    tasks: ClassVar = {
        "WithLMHeadModel": Task(
            LanguageModelConfig(bias=True),
            {"pred_layer.proj": "head"},
            copies={"pred_layer.proj.weight": "transformer.embeddings.weight"},
        ),
        "Model": Task(EmbedConfig(pooling="first", normalize=False), base=False),
        "ForSequenceClassification": Task(
            ClassifyConfig(hidden=False),
            {"sequence_summary.summary": "head.output"},
            (field("summary_first_dropout", 0.1, "dropout"),),
        ),
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (field("dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnsweringSimple": Task(SpanConfig(), {"qa_outputs": "head.output"}),
    }
    sizes = ("xlm-mlm-en-2048", "xlm-clm-ende-1024", "xlm-mlm-tlm-xnli15-1024")

    def adjust(self, tree: Tree, hub: Tree) -> None:
        if tree["head"]["kind"] == "classify":
            check_fixed(SUMMARY, hub)
        tree["encoder"]["feedforward"]["intermediate_size"] = 4 * tree["hidden_size"]
        languages = hub.get("n_langs", 1) if hub.get("use_lang_emb", True) else 1
        tree["embedding"]["num_languages"] = languages if languages > 1 else 0
        if hub.get("causal", False):
            tree["encoder"], tree["decoder"] = None, tree["encoder"]

    def describe(self, tree: Tree) -> Tree:
        causal, languages = tree["encoder"] is None, tree["embedding"]["num_languages"]
        found = write_fields(self.fields, {**tree, "encoder": tree["decoder"] if causal else tree["encoder"]})
        count = {"n_langs": languages} if languages else {}
        return {**found, **count, "causal": causal, "use_lang_emb": languages > 0}

    def _has_stacks(self, task: Task, config: ModelConfig) -> bool:
        return (config.encoder is None) != (config.decoder is None)

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        if config.decoder is None:
            return super().links(config, task, own)
        found = super().links(config, task, {_moved(name, "decoder", "encoder"): None for name in own})
        return [
            Link(
                link.theirs,
                dataclasses.replace(
                    link.part, ours=tuple(_moved(name, "encoder", "decoder") for name in link.part.ours)
                ),
            )
            for link in found
        ]


def _moved(name: str, old: str, new: str) -> str:
    """The name of one stack's tensor as the other's."""
    return new + name.removeprefix(old) if name.startswith(old) else name
