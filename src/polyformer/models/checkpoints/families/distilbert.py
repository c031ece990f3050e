"""DistilBERT: half of BERT's layers, distilled from BERT; no token types, no pooler. Sanh et al. 2019."""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import activation, option
from polyformer.models.checkpoints.families.bert import EMBEDDINGS
from polyformer.models.checkpoints.families.shared_tasks import multiple_choice
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, EmbedConfig, MaskedConfig, SpanConfig, TagConfig

LAYER = {
    "attention.q_lin": "attention.query",
    "attention.k_lin": "attention.key",
    "attention.v_lin": "attention.value",
    "attention.out_lin": "attention.output",
    "sa_layer_norm": "block.norms.0",
    "ffn.lin1": "feedforward.up",
    "ffn.lin2": "feedforward.down",
    "output_layer_norm": "block.norms.1",
}
MASKED = {
    "vocab_transform": "head.dense",
    "vocab_layer_norm": "head.norm",
    "vocab_projector": "head",
}


@register
class DistilBert(Family):
    """An encoder with half of BERT's layers; the epsilon of its norms, 1e-12, is not an option."""

    model_type = "distilbert"
    class_prefix = "DistilBert"
    paper = "Sanh et al. 2019"
    objective = "distillation of a teacher's predictions and hidden states, and masked language modelling"
    base_model_prefix = "distilbert"
    template = model_config("distilbert-base")
    config_mapping = (
        option("vocab_size", 30522, "vocab_size"),
        option("dim", 768, "hidden_size"),
        option("max_position_embeddings", 512, "max_position_embeddings"),
        option("n_layers", 6, "encoder.num_hidden_layers"),
        option("n_heads", 12, "encoder.attention.num_attention_heads"),
        option("hidden_dim", 3072, "encoder.feedforward.intermediate_size"),
        activation("activation", "gelu", "encoder.feedforward.activation"),
        option("dropout", 0.1, "encoder.dropout"),
        option("attention_dropout", 0.1, "encoder.attention.mechanism.dropout"),
        option("initializer_range", 0.02, "initializer_range"),
        option("pad_token_id", 0, "special.pad"),
        option("bos_token_id", None, "special.bos"),
        option("eos_token_id", None, "special.eos"),
        option("tie_word_embeddings", True, "embedding.tied"),
    )
    aliases: ClassVar = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    ignored_options = (
        "sinusoidal_pos_embds",
        "qa_dropout",
        "seq_classif_dropout",
    )  # initialization; other heads
    key_mapping: ClassVar = {
        **{f"embeddings.{theirs}": ours for theirs, ours in EMBEDDINGS.items() if "types" not in ours},
        **layered("transformer.layer.{i}", "encoder.layers.{i}", LAYER),
    }
    ignored_keys = ("*embeddings.position_ids",)
    tasks: ClassVar = {
        "Model": Task(EmbedConfig(pooling="first", normalize=False), prefixed=False),
        "ForMaskedLM": Task(
            MaskedConfig(),
            MASKED,
            (activation("activation", "gelu", "activation"),),
            {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(activation="relu"),
            {"pre_classifier": "head.dense", "classifier": "head.output"},
            (option("seq_classif_dropout", 0.2, "dropout"),),
        ),
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (option("dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, (option("qa_dropout", 0.1, "span_dropout"),)
        ),
        "ForMultipleChoice": multiple_choice(
            "pre_classifier",
            ClassifyConfig(num_labels=1, activation="relu"),
            option("seq_classif_dropout", 0.2, "text.dropout"),
        ),
    }
    sizes = ("distilbert-base",)
