"""DistilBERT: half of BERT's layers, taught by all of them; no token types, no pooler. Sanh et al. 2019."""

from typing import ClassVar

from polyformer.checkpoints.families.bert import EMBEDDINGS
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import act, field
from polyformer.checkpoints.names import layered
from polyformer.heads import ClassifyConfig, EmbedConfig, MaskedConfig, SpanConfig, TagConfig
from polyformer.presets import model_config

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
    """Its norms have one epsilon, 1e-12, which is no option."""

    model_type = "distilbert"
    classes = "DistilBert"
    paper = "Sanh et al. 2019"
    objective = "distillation: the teacher's predictions and states, and masked language modelling"
    base = "distilbert"
    template = model_config("distilbert-base")
    fields = (
        field("vocab_size", 30522, "vocab_size"),
        field("dim", 768, "hidden_size"),
        field("max_position_embeddings", 512, "max_position_embeddings"),
        field("n_layers", 6, "encoder.num_hidden_layers"),
        field("n_heads", 12, "encoder.attention.num_attention_heads"),
        field("hidden_dim", 3072, "encoder.feedforward.intermediate_size"),
        act("activation", "gelu", "encoder.feedforward.activation"),
        field("dropout", 0.1, "encoder.dropout"),
        field("attention_dropout", 0.1, "encoder.attention.mechanism.dropout"),
        field("initializer_range", 0.02, "initializer_range"),
        field("pad_token_id", 0, "special.pad"),
        field("bos_token_id", None, "special.bos"),
        field("eos_token_id", None, "special.eos"),
        field("tie_word_embeddings", True, "embedding.tied"),
    )
    aliases: ClassVar = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    inert = ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout")  # of a fresh table; of other heads
    names: ClassVar = {
        **{f"embeddings.{theirs}": ours for theirs, ours in EMBEDDINGS.items() if "types" not in ours},
        **layered("transformer.layer.{i}", "encoder.layers.{i}", LAYER),
    }
    ignored = ("*embeddings.position_ids",)
    tasks: ClassVar = {
        "Model": Task(EmbedConfig(pooling="first", normalize=False), base=False),
        "ForMaskedLM": Task(
            MaskedConfig(),
            MASKED,
            (act("activation", "gelu", "activation"),),
            {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ),
        "ForSequenceClassification": Task(
            ClassifyConfig(activation="relu"),
            {"pre_classifier": "head.dense", "classifier": "head.output"},
            (field("seq_classif_dropout", 0.2, "dropout"),),
        ),
        "ForTokenClassification": Task(
            TagConfig(), {"classifier": "head.output"}, (field("dropout", 0.1, "dropout"),)
        ),
        "ForQuestionAnswering": Task(
            SpanConfig(), {"qa_outputs": "head.output"}, (field("qa_dropout", 0.1, "span_dropout"),)
        ),
    }
    sizes = ("distilbert-base",)
