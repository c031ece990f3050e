"""DistilBERT with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from encoders import HEADS, counts, verify_encoder  # noqa: E402

from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.heads import ClassifyConfig, SpanConfig, TagConfig  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "dim": 12,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 20,
    "max_position_embeddings": 13,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"activation": "relu", "tie_word_embeddings": False, "pad_token_id": 2, "sinusoidal_pos_embds": True},
    {
        "activation": "gelu_new",
        "n_heads": 2,
        "dim": 10,
        "n_layers": 3,
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "qa_dropout": 0.4,
        "seq_classif_dropout": 0.5,
    },
]
CASES = [
    *((head, config, "right", "one") for head in HEADS for config in range(3)),
    *((head, 0, "left", "one") for head in HEADS[1:3]),
    *(("ForSequenceClassification", 0, "right", problem) for problem in ("several", "number")),
]


@pytest.mark.parametrize(("head", "config", "side", "problem"), CASES)
def test_distilbert(head: str, config: int, side: str, problem: str, tmp_path):
    verify_encoder(f"DistilBert{head}", {**SIZES, **CONFIGS[config]}, tmp_path, side=side, problem=problem)


def test_each_head_has_its_dropout():
    family = FAMILIES["distilbert"]
    hub = {"dropout": 0.1, "seq_classif_dropout": 0.2, "qa_dropout": 0.3}
    heads = {name: family.config(hub, name).head for name in family.tasks}
    assert heads["ForSequenceClassification"] == ClassifyConfig(activation="relu", dropout=0.2)
    assert heads["ForTokenClassification"] == TagConfig(dropout=0.1)
    assert heads["ForQuestionAnswering"] == SpanConfig(span_dropout=0.3)


def test_names_that_transformers_takes_too():
    config = FAMILIES["distilbert"].config({"hidden_size": 24, "num_hidden_layers": 2}, "ForMaskedLM")
    assert config.encoder is not None
    assert (config.hidden_size, config.encoder.num_hidden_layers) == (24, 2)


def test_parameters():
    """66M in Sanh et al. 2019, table 3, without the masked head."""
    assert counts("distilbert-base", "DistilBertForMaskedLM") == (66_985_530, 66_985_530)
