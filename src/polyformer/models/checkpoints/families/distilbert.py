"""DistilBERT: half of BERT's layers, distilled from BERT; no token types, no pooler. Sanh et al. 2019."""

from typing import ClassVar

from polyformer.models.checkpoints.config_mapping import activation, option
from polyformer.models.checkpoints.families.bert import EMBEDDINGS
from polyformer.models.checkpoints.families.common import FIRST_TOKEN, multiple_choice
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.checkpoints.values import options, special
from polyformer.models.presets import model_config
from polyformer.nn.heads import ClassifyConfig, MaskedConfig, SpanConfig, TagConfig


@register
class DistilBert(Family):
    """An encoder with half of BERT's layers; the epsilon of its norms, 1e-12, is not an option."""

    model_type = "distilbert"
    class_prefix = "DistilBert"
    paper = "Sanh et al. 2019"
    objective = "distillation of a teacher's predictions and hidden states, and masked language modelling"
    base_model_prefix = "distilbert"
    template = model_config("distilbert-base")
    config_mapping = options(
        "encoder",
        {"vocab_size": 30522, "dim": 768, "max_position_embeddings": 512, "n_layers": 6, "n_heads": 12},
        {"hidden_dim": 3072, "activation": "gelu", "dropout": 0.1, "attention_dropout": 0.1},
        {"initializer_range": 0.02, **special(pad=0)},
    )
    # an initialization, which is in the file, and the dropouts of other heads
    ignored_options = ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout")
    key_mapping: ClassVar = {
        **{theirs: ours for theirs, ours in EMBEDDINGS.items() if "types" not in ours},
        **layered(
            "transformer.layer.{i}",
            "encoder.layers.{i}",
            {
                "attention.[q|k|v|out]_lin": "attention.[query|key|value|output]",
                "ffn.lin[1|2]": "feedforward.[up|down]",
                "[sa|output]_layer_norm": "block.norms.[0|1]",
            },
        ),
    }
    ignored_keys = ("*embeddings.position_ids",)
    tasks: ClassVar = {
        "Model": FIRST_TOKEN,
        "ForMaskedLM": Task(
            MaskedConfig(),
            {"vocab_[transform|layer_norm]": "head.[dense|norm]", "vocab_projector": "head"},
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
