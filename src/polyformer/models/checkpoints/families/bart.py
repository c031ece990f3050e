"""BART: post-norm encoder-decoder with learned positions. Lewis et al. 2020.

Their decoder without an encoder has weights of a cross-attention that it never computes, and their untied
models have a token table that they never read: both are kept as unused tensors
(polyformer.core.unused_tensors).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from polyformer.models.checkpoints.config_mapping import activation, both, option
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Link, layered
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, EmbedConfig, LanguageModelConfig, SpanConfig


@dataclasses.dataclass(frozen=True)
class RowVector(Converter):
    """A vector [V] as a matrix [1, V]."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Convert [1, V] to [V]."""
        return (theirs.squeeze(0),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Convert [V] to [1, V]."""
        return ours[0].unsqueeze(0)


def attention(theirs: str, ours: str) -> dict[str, str]:
    """Return the projections of an attention layer."""
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
    return {f"{theirs}.{their_name}": f"{ours}.{our_name}" for their_name, our_name in names.items()}


def layer(norms: int) -> dict[str, str]:
    """Return a layer with `norms` norms; with three it has cross-attention."""
    cross = {**attention("encoder_attn", "cross_attention"), "encoder_attn_layer_norm": "block.norms.1"}
    return {
        **attention("self_attn", "attention"),
        "self_attn_layer_norm": "block.norms.0",
        **(cross if norms == 3 else {}),
        "fc1": "feedforward.up",
        "fc2": "feedforward.down",
        "final_layer_norm": f"block.norms.{norms - 1}",
    }


def stack(side: str, norms: int) -> dict[str, str | Converter]:
    """Return the tensors of a stack that are not shared."""
    return {
        f"{side}.embed_positions": f"{side}.position.tables.0",
        f"{side}.layernorm_embedding": f"{side}_embedding.norm",
        **layered(f"{side}.layers.{{i}}", f"{side}.layers.{{i}}", layer(norms)),
    }


TABLES = {"shared": "tokens", "encoder.embed_tokens": "tokens", "decoder.embed_tokens": "decoder_tokens"}
"""The token table that both stacks share, and the tables of models that do not share it."""

OPTIONS = (
    option("vocab_size", 50265, "vocab_size"),
    option("d_model", 1024, "hidden_size"),
    option("max_position_embeddings", 1024, "max_position_embeddings"),
    option("encoder_layers", 12, "encoder.num_hidden_layers"),
    option("decoder_layers", 12, "decoder.num_hidden_layers"),
    option("encoder_ffn_dim", 4096, "encoder.feedforward.intermediate_size"),
    option("decoder_ffn_dim", 4096, "decoder.feedforward.intermediate_size"),
    option("encoder_attention_heads", 16, "encoder.attention.num_attention_heads"),
    option("decoder_attention_heads", 16, "decoder.attention.num_attention_heads"),
    activation("activation_function", "gelu", *both("feedforward.activation")),
    option("dropout", 0.1, *both("dropout")),
    option("attention_dropout", 0.0, *both("attention.mechanism.dropout")),
    option("activation_dropout", 0.0, *both("feedforward.inner_dropout")),
    option("encoder_layerdrop", 0.0, "encoder.layerdrop"),
    option("decoder_layerdrop", 0.0, "decoder.layerdrop"),
    option("init_std", 0.02, "initializer_range"),
    option("scale_embedding", False, "embedding.scaled"),
    option("pad_token_id", 1, "special.pad"),
    option("eos_token_id", 2, "special.eos"),
    option("decoder_start_token_id", 2, "special.bos"),
    option("tie_word_embeddings", True, "embedding.tied", "embedding.shared"),
)

LM_HEAD = {"lm_head.weight": "head.weight"}


def stack_tables(base: str) -> dict[str, str]:
    """Return the stacks' names of the shared token table."""
    return {f"{base}{side}.embed_tokens.weight": f"{base}shared.weight" for side in ("encoder", "decoder")}


SHARED = ("{base}shared.weight",)
"""A token table that no untied model reads."""

TIED = {"lm_head.weight": "model.shared.weight", **stack_tables("model.")}


@register
class Bart(Family):
    """An encoder-decoder that reconstructs noised text."""

    model_type = "bart"
    class_prefix = "Bart"
    paper = "Lewis et al. 2020"
    objective = "denoising: text infilling and shuffled sentences"
    base_model_prefix = "model"
    template = model_config("bart-base")
    config_mapping = OPTIONS
    aliases: ClassVar = {
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    }
    required: ClassVar = {
        "add_final_layer_norm": False,
        "normalize_before": False,
        "normalize_embedding": True,
        "static_position_embeddings": False,
        "extra_pos_embeddings": 2,
    }
    ignored_options = (
        "bos_token_id",
        "chunk_size_feed_forward",
        "forced_eos_token_id",
        "is_decoder",
        "is_encoder_decoder",
        "use_cache",
    )
    key_mapping: ClassVar = {**TABLES, **stack("encoder", 2), **stack("decoder", 3)}
    ignored_keys = ("*coder.embed_tokens.weight", "*coder.version")
    head_dropouts = ("classifier_dropout",)
    num_labels = 3
    tasks: ClassVar = {
        "ForConditionalGeneration": Task(
            LanguageModelConfig(bias=True, frozen_bias=True),
            {**LM_HEAD, "final_logits_bias": RowVector(("head.bias",))},
            tied_keys=TIED,
            unused_keys=SHARED,
        ),
        "Model": Task(
            EmbedConfig(normalize=False), tied_keys=stack_tables(""), prefixed=False, unused_keys=SHARED
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(dropout=0.0, drops_twice=True),
            {"classification_head.dense": "head.dense", "classification_head.out_proj": "head.output"},
            (option("eos_token_id", 2, "end_token"),),
            stack_tables("model."),
            unused_keys=SHARED,
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, tied_keys=stack_tables("model."), unused_keys=SHARED
        ),
        "ForCausalLM": Task(
            LanguageModelConfig(),
            LM_HEAD,
            tied_keys=dict.fromkeys(
                ["lm_head.weight", "model.shared.weight"], "model.decoder.embed_tokens.weight"
            ),
            without="encoder",
            unused_keys=("{base}decoder.layers.*.encoder_attn*",),
            trunk={"decoder.embed_tokens": "tokens", **stack("decoder", 2)},
        ),
    }
    sizes = ("bart-base", "bart-large")

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links as for every family, with the token tables that the model has."""
        links = super().links(config, task, own)
        if self.tasks[task].without:
            return links
        other = "encoder.embed_tokens" if config.embedding.shared else "shared"
        return [link for link in links if link.theirs.removeprefix("model.") != f"{other}.weight"]
