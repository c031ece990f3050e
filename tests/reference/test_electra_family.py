"""ELECTRA's discriminator and generator with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from encoders import HEADS, counts, verify_encoder  # noqa: E402
from families import counted, texts, verify  # noqa: E402

import polyformer  # noqa: E402
from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "embedding_size": 5,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 19,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"hidden_act": "relu", "layer_norm_eps": 1e-6, "type_vocab_size": 3, "tie_word_embeddings": False},
    {
        "hidden_act": "gelu_new",
        "num_attention_heads": 2,
        "hidden_size": 10,
        "embedding_size": 10,
        "pad_token_id": 2,
        "num_hidden_layers": 3,
        "classifier_dropout": 0.4,
    },
]
CASES = [
    *((head, config, "right", "one") for head in HEADS for config in range(3)),
    *((head, 0, "left", "one") for head in HEADS[1:3]),
    *(("ForSequenceClassification", 0, "right", problem) for problem in ("several", "number")),
]


@pytest.mark.parametrize(("head", "config", "side", "problem"), CASES)
def test_electra(head: str, config: int, side: str, problem: str, tmp_path):
    options = {**SIZES, **CONFIGS[config]}
    verify_encoder(f"Electra{head}", options, tmp_path, side=side, problem=problem, types=2)


class Labels(torch.Tensor):
    """Which transformers makes float32 whatever the model is, and here are not."""

    def float(self) -> torch.Tensor:  # type: ignore[override]
        return self.double()


@pytest.mark.parametrize(("config", "side"), [(0, "right"), (0, "left"), (1, "right"), (2, "right")])
def test_detection(config: int, side: str, tmp_path):
    """Of every real token whether it was replaced; padding counts nowhere."""
    chosen = transformers.ElectraConfig(**{**SIZES, **CONFIGS[config]})
    torch.manual_seed(7)
    inputs = texts(23, pad=chosen.pad_token_id, side=side)
    replaced = torch.randint(2, inputs["input_ids"].shape)
    verify(
        transformers.ElectraForPreTraining(chosen),
        inputs,
        tmp_path,
        labels={"labels": replaced},
        their_labels={"labels": replaced.as_subclass(Labels)},
        only_theirs={"position_ids": counted(inputs["attention_mask"])},
    )


def test_a_discriminator_becomes_a_classifier_with_a_fresh_head(tmp_path):
    config = transformers.ElectraConfig(**SIZES)
    theirs = transformers.ElectraForPreTraining(config)
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="not in the checkpoint, newly initialized: head.dense.weight"):
        ours = polyformer.from_pretrained(tmp_path, head="ForSequenceClassification")
    assert torch.equal(ours.tokens.weight, theirs.electra.embeddings.word_embeddings.weight)


@pytest.mark.parametrize(
    ("preset", "head", "count", "millions"),
    [
        ("electra-small", "ElectraForPreTraining", 13_549_057, 14),
        ("electra-base", "ElectraForPreTraining", 109_483_009, 110),
        ("electra-large", "ElectraForPreTraining", 335_142_913, 335),
        ("electra-base-generator", "ElectraForMaskedLM", 33_740_602, None),
    ],
)
def test_parameters(preset: str, head: str, count: int, millions: int | None):
    """`millions` is what Clark et al. 2020, tables 1 and 2, print."""
    assert counts(preset, head) == (count, count)
    assert millions is None or abs(count / 1e6 - millions) < 1


def test_what_is_not_computed_is_refused():
    with pytest.raises(InputError, match="is_decoder is True, and only False is supported"):
        FAMILIES["electra"].config({"is_decoder": True}, "ForMaskedLM")
