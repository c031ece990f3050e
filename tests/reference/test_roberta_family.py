"""RoBERTa and XLM-RoBERTa with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from encoders import HEADS, PROBLEMS, counts, verify_encoder  # noqa: E402

from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}
CONFIGS: list[dict[str, Any]] = [
    {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    {"hidden_act": "gelu_new", "tie_word_embeddings": False, "pad_token_id": 3},
    {
        "hidden_act": "relu",
        "num_attention_heads": 2,
        "hidden_size": 10,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "max_position_embeddings": 12,
        "classifier_dropout": 0.3,
    },
]
CASES = [
    *(("Roberta", head, config, "right", "one") for head in HEADS for config in range(3)),
    *(("Roberta", head, 1, "left", "one") for head in ("ForMaskedLM", "ForTokenClassification")),
    *(("Roberta", "ForSequenceClassification", 0, "right", item) for item in PROBLEMS if item != "one"),
    *(("XLMRoberta", head, 0, "right", "one") for head in HEADS),
    ("XLMRoberta", "ForMaskedLM", 1, "left", "one"),
]


@pytest.mark.parametrize(("family", "head", "config", "side", "problem"), CASES)
def test_roberta(family: str, head: str, config: int, side: str, problem: str, tmp_path):
    options = {**SIZES, **CONFIGS[config]}
    verify_encoder(
        family + head,
        options,
        tmp_path,
        side=side,
        problem=problem,
        positions=False,
        types=options.get("type_vocab_size", 2),
        dead=("lm_head.bias",) if config == 1 else (),
    )


@pytest.mark.parametrize(
    ("preset", "head", "count", "millions"),
    [
        ("roberta-base", "RobertaForMaskedLM", 124_697_433, 125),
        ("roberta-large", "RobertaForMaskedLM", 355_412_057, 355),
        ("xlm-roberta-base", "XLMRobertaForMaskedLM", 278_295_186, 270),
        ("xlm-roberta-large", "XLMRobertaForMaskedLM", 560_142_482, 550),
    ],
)
def test_parameters(preset: str, head: str, count: int, millions: int):
    """`millions` is what the papers print."""
    assert counts(preset, head) == (count, count)
    assert abs(count / 1e6 - millions) < 11


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pad_token_id": None}, "config.json: pad_token_id is None"),
        ({"is_decoder": True}, "config.json: is_decoder is True, and only False is supported"),
        (
            {"position_embedding_type": "relative_key"},
            "config.json: position_embedding_type is 'relative_key'",
        ),
        ({"hidden_act": "quick_gelu"}, "unknown hidden_act 'quick_gelu'"),
        ({"max_position_embeddings": 2}, "max_position_embeddings: expected 1 or more, got 0"),
    ],
)
def test_what_is_not_computed_is_refused(changed: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        FAMILIES["roberta"].config({"pad_token_id": 1, **changed}, "ForMaskedLM")
    assert str(caught.value).startswith(message)


def test_heads_that_are_not_loaded_are_refused():
    with pytest.raises(InputError, match="unknown architecture of 'roberta' 'RobertaForPreTraining'"):
        FAMILIES["roberta"].task({"architectures": ["RobertaForPreTraining"]}, None)
