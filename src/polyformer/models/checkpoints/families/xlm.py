"""XLM: one post-norm stack for many languages, each with its own vector. Conneau and Lample 2019.

With `causal` it is only a decoder. It differs from transformers in two points: only the attention_mask
defines the real tokens (`lengths` is not accepted), and a causal model does not attend to padding on either
side.
"""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import Option, Tree, check_required, option
from polyformer.models.checkpoints.families.common import FIRST_TOKEN, QUESTION_ANSWERING
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.values import options, special
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, LanguageModelConfig, TagConfig

# The supported options of a head that classifies texts.
SUMMARY = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": None,
    "summary_proj_to_labels": True,
}


@register
class Xlm(Family):
    """An encoder, or a decoder if the model is causal."""

    model_type = "xlm"
    class_prefix = "XLM"
    paper = "Conneau and Lample 2019"
    objective = "causal, masked and translation language modelling"
    base_model_prefix = "transformer"
    template = model_config("xlm-mlm-en-2048")
    config_mapping = options(
        "encoder",
        {"vocab_size": 30145, "emb_dim": 2048, "max_position_embeddings": 512, "n_layers": 12, "n_heads": 16},
        Option(
            "gelu_activation",
            True,
            ("encoder.feedforward.activation",),
            lambda gelu: "gelu" if gelu else "relu",
            lambda name: name == "gelu",
        ),
        {"dropout": 0.1, "attention_dropout": 0.1, "layer_norm_eps": 1e-12, "init_std": 0.02},
        special(2, 0, 1),
    )
    aliases: ClassVar = {
        "n_words": "vocab_size",
        "bos_index": "bos_token_id",
        "eos_index": "eos_token_id",
        "pad_index": "pad_token_id",
    }
    required: ClassVar = {"asm": False, "is_encoder": True}
    other_options: ClassVar = {"causal": False, "use_lang_emb": True}
    # n_langs counts vectors only with use_lang_emb; two options initialize tables, which are in the file; the
    # rest belongs to other heads and to `generate`
    ignored_options = (
        *("n_langs", "sinusoidal_embeddings", "embed_init_std", "unk_index", "mask_index", "mask_token_id"),
        *("lang_id", "start_n_top", "end_n_top", *SUMMARY, "summary_first_dropout"),
    )
    # layers are numbered in their parts: attentions.0, ffns.0
    key_mapping: ClassVar = {
        "embeddings": "tokens",
        "position_embeddings": "encoder.position.tables.0",
        "lang_embeddings": "encoder_embedding.languages",
        "layer_norm_emb": "encoder_embedding.norm",
        "attentions.{i}.[q|k|v|out]_lin": "encoder.layers.{i}.attention.[query|key|value|output]",
        "ffns.{i}.lin[1|2]": "encoder.layers.{i}.feedforward.[up|down]",
        "layer_norm[1|2].{i}": "encoder.layers.{i}.block.norms.[0|1]",
    }
    ignored_keys = ("*position_ids",)
    tasks: ClassVar = {
        "WithLMHeadModel": Task(
            LanguageModelConfig(bias=True),
            {"pred_layer.proj": "head"},
            tied_keys={"pred_layer.proj.weight": "transformer.embeddings.weight"},
        ),
        "Model": FIRST_TOKEN,
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
        # The inner width is not an option.
        tree["encoder"]["feedforward"]["intermediate_size"] = 4 * tree["hidden_size"]
        # A single language has no vector, since all tokens would get the same.
        languages = hub.get("n_langs", 1) if hub["use_lang_emb"] else 1
        tree["embedding"]["num_languages"] = languages if languages > 1 else 0
        if hub["causal"]:
            tree["encoder"], tree["decoder"] = None, tree["encoder"]

    def write_other_options(self, tree: Tree) -> Tree:
        """Return whether the model is causal, and the options of the languages."""
        languages = tree["embedding"]["num_languages"]
        count = {"n_langs": languages} if languages else {}
        return {**count, "causal": tree["decoder"] is not None, "use_lang_emb": languages > 0}

    def _has_stacks(self, task: Task, config: ModelConfig) -> bool:
        return (config.encoder is None) != (config.decoder is None)
