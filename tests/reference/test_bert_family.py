"""BERT with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from families import counted, texts, verify  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 19,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6, "type_vocab_size": 3, "tie_word_embeddings": False},
    {
        "hidden_act": "relu",
        "num_attention_heads": 2,
        "hidden_size": 10,
        "num_hidden_layers": 3,
        "pad_token_id": 2,
    },
]
TOKENS = torch.full((3, 11), -100)
TOKENS[0, 3], TOKENS[1, 0], TOKENS[2, 2] = 5, 22, 0
HEADS: dict[str, Any] = {
    "BertModel": ({}, None, None),
    "BertForMaskedLM": ({}, {"labels": TOKENS}, None),
    "BertForPreTraining": (
        {},
        {"labels": TOKENS, "sentence_labels": torch.tensor([0, 1, 1])},
        {"labels": TOKENS, "next_sentence_label": torch.tensor([0, 1, 1])},
    ),
    "BertForNextSentencePrediction": ({}, {"labels": torch.tensor([0, 1, 1])}, None),
    "BertForSequenceClassification": ({"num_labels": 3}, {"labels": torch.tensor([2, 0, 1])}, None),
    "BertForTokenClassification": ({"num_labels": 4}, {"labels": TOKENS.clamp_max(3)}, None),
    "BertForQuestionAnswering": ({}, None, None),
}


LEFT = ("BertForMaskedLM", "BertForTokenClassification")
"""Heads that are compared with padding on the left too: transformers pools the first slot, padding or not."""


@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize(
    ("head", "side"), [*((item, "right") for item in HEADS), *((item, "left") for item in LEFT)]
)
def test_bert(head: str, config: int, side: str, tmp_path):
    options, labels, their_labels = HEADS[head]
    chosen = transformers.BertConfig(**{**SIZES, **CONFIGS[config], **options})
    inputs = texts(23, pad=chosen.pad_token_id, side=side)
    inputs["token_type_ids"] = (torch.arange(11) % 3 == 1).long().expand(3, -1)
    if labels is not None and labels["labels"].dim() == 2:
        hidden = inputs["attention_mask"] == 0
        labels = {**labels, "labels": labels["labels"].masked_fill(hidden, -100)}
        their_labels = None if their_labels is None else {**their_labels, "labels": labels["labels"]}
    verify(
        getattr(transformers, head)(chosen),
        inputs,
        tmp_path,
        labels=labels,
        their_labels=their_labels,
        only_theirs={"position_ids": counted(inputs["attention_mask"])},
        dead=() if chosen.tie_word_embeddings else ("cls.predictions.bias",),
    )
