"""ALBERT with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from encoders import HEADS, counts, labels, verify_encoder  # noqa: E402
from families import counted, texts, verify  # noqa: E402

from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "embedding_size": 5,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 19,
}
CONFIGS: list[dict[str, Any]] = [
    {"num_hidden_groups": 2},
    {"hidden_act": "relu", "layer_norm_eps": 1e-6, "type_vocab_size": 3, "tie_word_embeddings": False},
    {
        "hidden_act": "gelu",
        "num_attention_heads": 2,
        "hidden_size": 10,
        "embedding_size": 10,
        "pad_token_id": 2,
        "num_hidden_layers": 3,
        "num_hidden_groups": 3,
        "classifier_dropout_prob": 0.4,
    },
]
CASES = [
    *((head, config, "right", "one") for head in HEADS for config in range(3)),
    *((head, 0, "left", "one") for head in HEADS[1:3]),
    *(("ForSequenceClassification", 0, "right", problem) for problem in ("several", "number")),
]


@pytest.mark.parametrize(("head", "config", "side", "problem"), CASES)
def test_albert(head: str, config: int, side: str, problem: str, tmp_path):
    verify_encoder(
        f"Albert{head}",
        {**SIZES, **CONFIGS[config]},
        tmp_path,
        side=side,
        problem=problem,
        types=2,
        dead=("predictions.bias",) if config == 1 else (),
    )


@pytest.mark.parametrize("config", range(3))
def test_pretraining(config: int, tmp_path):
    """The masked tokens and the order of two sentences."""
    chosen = transformers.AlbertConfig(**{**SIZES, **CONFIGS[config]})
    torch.manual_seed(7)
    inputs = texts(23, pad=chosen.pad_token_id)
    masked, _ = labels("ForMaskedLM", inputs["attention_mask"], "one")
    order = torch.tensor([0, 1, 1])
    verify(
        transformers.AlbertForPreTraining(chosen),
        inputs,
        tmp_path,
        labels={**masked, "sentence_labels": order},
        their_labels={**masked, "sentence_order_label": order},
        only_theirs={"position_ids": counted(inputs["attention_mask"])},
        dead=("predictions.bias",) if config == 1 else (),
    )


@pytest.mark.parametrize(
    ("preset", "width", "count", "millions"),
    [
        ("albert-base", 768, 11_221_680, 11.7),
        ("albert-large", 1024, 16_795_824, 17.7),
        ("albert-xxlarge", 4096, 206_368_944, 222.6),
    ],
)
def test_parameters(preset: str, width: int, count: int, millions: float):
    """`millions`: of the published weights, which have a pooler and not the masked head's own.

    Lan et al. 2020, table 1, prints 12, 18 and 235.
    """
    assert counts(preset, "AlbertForMaskedLM") == (count, count)
    own = 128 * width + 128 + 2 * 128 + 30000
    assert round((count - own + width * width + width) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inner_group_num": 2}, "config.json: inner_group_num is 2, and only 1 is supported"),
        (
            {"num_hidden_groups": 5},
            "config.json: num_hidden_groups is 5, expected a divisor of the 12 layers",
        ),
    ],
)
def test_what_is_not_computed_is_refused(changed: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        FAMILIES["albert"].config(changed, "ForMaskedLM")
    assert str(caught.value).startswith(message)
