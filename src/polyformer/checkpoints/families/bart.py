"""BART: post-norm encoder-decoder with learned positions. Lewis et al. 2020.

Their decoder alone has weights of a cross-attention that it never computes, and their untied models a table
of tokens that they never read: ours keep them beside (polyformer.core.unused_tensors).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import act, both, field
from polyformer.checkpoints.names import Link, Part, layered
from polyformer.heads import ClassifyConfig, EmbedConfig, LanguageModelConfig, SpanConfig
from polyformer.presets import model_config


@dataclasses.dataclass(frozen=True)
class Row(Part):
    """A vector [V] as a matrix [1, V]."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return (theirs.squeeze(0),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        return ours[0].unsqueeze(0)


def attention(theirs: str, ours: str) -> dict[str, str]:
    """The projections of an attention layer."""
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
    return {f"{theirs}.{one}": f"{ours}.{name}" for one, name in names.items()}


def layer(norms: int) -> dict[str, str]:
    """A layer with so many norms; with three it reads the encoder's output."""
    cross = {**attention("encoder_attn", "cross_attention"), "encoder_attn_layer_norm": "block.norms.1"}
    return {
        **attention("self_attn", "attention"),
        "self_attn_layer_norm": "block.norms.0",
        **(cross if norms == 3 else {}),
        "fc1": "feedforward.up",
        "fc2": "feedforward.down",
        "final_layer_norm": f"block.norms.{norms - 1}",
    }


def stack(side: str, norms: int) -> dict[str, str | Part]:
    """What one of the stacks has of its own."""
    return {
        f"{side}.embed_positions": f"{side}.position.tables.0",
        f"{side}.layernorm_embedding": f"{side}_embedding.norm",
        **layered(f"{side}.layers.{{i}}", f"{side}.layers.{{i}}", layer(norms)),
    }


TABLES = {"shared": "tokens", "encoder.embed_tokens": "tokens", "decoder.embed_tokens": "decoder_tokens"}
"""Where the table of tokens stands that all share, and those of models that share none."""

FIELDS = (
    field("vocab_size", 50265, "vocab_size"),
    field("d_model", 1024, "hidden_size"),
    field("max_position_embeddings", 1024, "max_position_embeddings"),
    field("encoder_layers", 12, "encoder.num_hidden_layers"),
    field("decoder_layers", 12, "decoder.num_hidden_layers"),
    field("encoder_ffn_dim", 4096, "encoder.feedforward.intermediate_size"),
    field("decoder_ffn_dim", 4096, "decoder.feedforward.intermediate_size"),
    field("encoder_attention_heads", 16, "encoder.attention.num_attention_heads"),
    field("decoder_attention_heads", 16, "decoder.attention.num_attention_heads"),
    act("activation_function", "gelu", *both("feedforward.activation")),
    field("dropout", 0.1, *both("dropout")),
    field("attention_dropout", 0.0, *both("attention.mechanism.dropout")),
    field("activation_dropout", 0.0, *both("feedforward.inner_dropout")),
    field("encoder_layerdrop", 0.0, "encoder.layerdrop"),
    field("decoder_layerdrop", 0.0, "decoder.layerdrop"),
    field("init_std", 0.02, "initializer_range"),
    field("scale_embedding", False, "embedding.scaled"),
    field("pad_token_id", 1, "special.pad"),
    field("eos_token_id", 2, "special.eos"),
    field("decoder_start_token_id", 2, "special.bos"),
    field("tie_word_embeddings", True, "embedding.tied", "embedding.shared"),
)

LM_HEAD = {"lm_head.weight": "head.weight"}


def copies(base: str) -> dict[str, str]:
    """The stacks' names of the shared table of tokens."""
    return {f"{base}{side}.embed_tokens.weight": f"{base}shared.weight" for side in ("encoder", "decoder")}


SHARED = ("{base}shared.weight",)
"""A table of tokens that no untied model reads."""

TIED = {"lm_head.weight": "model.shared.weight", **copies("model.")}


@register
class Bart(Family):
    """Noised text in, the text out."""

    model_type = "bart"
    classes = "Bart"
    paper = "Lewis et al. 2020"
    objective = "denoising: text infilling and shuffled sentences"
    base = "model"
    template = model_config("bart-base")
    fields = FIELDS
    aliases: ClassVar = {
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    }
    fixed: ClassVar = {
        "add_final_layer_norm": False,
        "normalize_before": False,
        "normalize_embedding": True,
        "static_position_embeddings": False,
        "extra_pos_embeddings": 2,
    }
    inert = (
        "bos_token_id",
        "chunk_size_feed_forward",
        "forced_eos_token_id",
        "is_decoder",
        "is_encoder_decoder",
        "use_cache",
    )
    names: ClassVar = {**TABLES, **stack("encoder", 2), **stack("decoder", 3)}
    ignored = ("*coder.embed_tokens.weight", "*coder.version")
    dropouts = ("classifier_dropout",)
    num_labels = 3
    tasks: ClassVar = {
        "ForConditionalGeneration": Task(
            LanguageModelConfig(bias=True, frozen_bias=True),
            {**LM_HEAD, "final_logits_bias": Row(("head.bias",))},
            copies=TIED,
            unused_keys=SHARED,
        ),
        "Model": Task(EmbedConfig(normalize=False), copies=copies(""), base=False, unused_keys=SHARED),
        "ForSequenceClassification": Task(
            ClassifyConfig(dropout=0.0, drops_twice=True),
            {"classification_head.dense": "head.dense", "classification_head.out_proj": "head.output"},
            (field("eos_token_id", 2, "end_token"),),
            copies("model."),
            unused_keys=SHARED,
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, copies=copies("model."), unused_keys=SHARED
        ),
        "ForCausalLM": Task(
            LanguageModelConfig(),
            LM_HEAD,
            copies=dict.fromkeys(
                ["lm_head.weight", "model.shared.weight"], "model.decoder.embed_tokens.weight"
            ),
            without="encoder",
            unused_keys=("{base}decoder.layers.*.encoder_attn*",),
            trunk={"decoder.embed_tokens": "tokens", **stack("decoder", 2)},
        ),
    }
    sizes = ("bart-base", "bart-large")

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """As for every family, with the tables of tokens that the model has."""
        found = super().links(config, task, own)
        if self.tasks[task].without:
            return found
        other = "encoder.embed_tokens" if config.embedding.shared else "shared"
        return [link for link in found if link.theirs.removeprefix("model.") != f"{other}.weight"]
