"""XLM: one post-norm stack for many languages, each with its own vector. Conneau and Lample 2019.

With `causal` it is only a decoder. It differs from transformers in two points: only the attention_mask
defines the real tokens (`lengths` is not accepted), and a causal model does not attend to padding on either
side.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from polyformer.models.checkpoints.config_mapping import Option, Tree, check_required, option, write_options
from polyformer.models.checkpoints.families.shared_tasks import QUESTION_ANSWERING
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_conversion import moved, of_decoder
from polyformer.models.checkpoints.key_mapping import Link
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, EmbedConfig, LanguageModelConfig, TagConfig

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
"""The supported options of a head that classifies texts."""


@register
class Xlm(Family):
    """An encoder, or a decoder if the model is causal; `links` then renames its tensors."""

    model_type = "xlm"
    class_prefix = "XLM"
    paper = "Conneau and Lample 2019"
    objective = "causal, masked and translation language modelling"
    base_model_prefix = "transformer"
    template = model_config("xlm-mlm-en-2048")
    config_mapping = (
        option("vocab_size", 30145, "vocab_size"),
        option("emb_dim", 2048, "hidden_size"),
        option("max_position_embeddings", 512, "max_position_embeddings"),
        option("n_layers", 12, "encoder.num_hidden_layers"),
        option("n_heads", 16, "encoder.attention.num_attention_heads"),
        Option(
            "gelu_activation",
            True,
            ("encoder.feedforward.activation",),
            lambda gelu: "gelu" if gelu else "relu",
            lambda name: name == "gelu",
        ),
        option("dropout", 0.1, "encoder.dropout"),
        option("attention_dropout", 0.1, "encoder.attention.mechanism.dropout"),
        option("layer_norm_eps", 1e-12, "encoder.norm.eps"),
        option("init_std", 0.02, "initializer_range"),
        option("pad_token_id", 2, "special.pad"),
        option("bos_token_id", 0, "special.bos"),
        option("eos_token_id", 1, "special.eos"),
        option("tie_word_embeddings", True, "embedding.tied"),
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
    required: ClassVar = {"asm": False, "is_encoder": True}
    other_options = ("causal", "use_lang_emb")
    # n_langs counts vectors only with use_lang_emb; two options initialize tables, which are in the file; the
    # rest belongs to other heads and to `generate`
    ignored_options = (
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
    key_mapping: ClassVar = {
        "embeddings": "tokens",
        "position_embeddings": "encoder.position.tables.0",
        "lang_embeddings": "encoder_embedding.languages",
        "layer_norm_emb": "encoder_embedding.norm",
        **{theirs: f"encoder.layers.{{i}}.{ours}" for theirs, ours in LAYER.items()},
    }
    ignored_keys = ("*position_ids",)
    tasks: ClassVar = {
        "WithLMHeadModel": Task(
            LanguageModelConfig(bias=True),
            {"pred_layer.proj": "head"},
            tied_keys={"pred_layer.proj.weight": "transformer.embeddings.weight"},
        ),
        "Model": Task(EmbedConfig(pooling="first", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(
            ClassifyConfig(hidden=False),
            {"sequence_summary.summary": "head.output"},
            (option("summary_first_dropout", 0.1, "dropout"),),
        ),
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (option("dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnsweringSimple": QUESTION_ANSWERING,
    }
    sizes = ("xlm-mlm-en-2048", "xlm-clm-ende-1024", "xlm-mlm-tlm-xnli15-1024")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the inner width, the languages, and the stack, which is a decoder if it is causal."""
        if tree["head"]["kind"] == "classify":
            check_required(SUMMARY, hub)
        tree["encoder"]["feedforward"]["intermediate_size"] = 4 * tree["hidden_size"]
        languages = hub.get("n_langs", 1) if hub.get("use_lang_emb", True) else 1
        tree["embedding"]["num_languages"] = languages if languages > 1 else 0
        if hub.get("causal", False):
            tree["encoder"], tree["decoder"] = None, tree["encoder"]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the existing stack, and of the languages."""
        causal, languages = tree["encoder"] is None, tree["embedding"]["num_languages"]
        hub = write_options(
            self.config_mapping, {**tree, "encoder": tree["decoder"] if causal else tree["encoder"]}
        )
        count = {"n_langs": languages} if languages else {}
        return {**hub, **count, "causal": causal, "use_lang_emb": languages > 0}

    def _has_stacks(self, task: Task, config: ModelConfig) -> bool:
        return (config.encoder is None) != (config.decoder is None)

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links as for every family, with the decoder's names if the model is causal."""
        if config.decoder is None:
            return super().links(config, task, own)
        links = super().links(config, task, {moved(name, "decoder", "encoder"): None for name in own})
        return [Link(link.theirs, of_decoder(link.converter)) for link in links]
