"""CTRL with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import (  # noqa: E402
    counts,
    read_config,
    verify_decoder,
    verify_writer,
)
from transformers.models.ctrl import modeling_ctrl  # noqa: E402

from polyformer.core.errors import InputError  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 19,
    "dff": 20,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {
        "n_embd": 15,
        "n_layer": 3,
        "dff": 7,
        "resid_pdrop": 0.2,
        "embd_pdrop": 0.3,
        "tie_word_embeddings": False,
    },
]
HEADS: dict[str, Any] = {
    "CTRLLMHeadModel": ({}, {}),
    "CTRLModel": ({}, {}),
    "CTRLForSequenceClassification": ({"num_labels": 3}, {"labels": {"labels": torch.tensor([2, 0, 1])}}),
}


def their_model(head: str, config: int, **options: Any) -> Any:
    """With its table of positions in float64, where it is made in float32."""
    torch.manual_seed(7)
    chosen = transformers.CTRLConfig(**{**SIZES, **CONFIGS[config], **options})
    model = getattr(transformers, head)(chosen)
    trunk = getattr(model, "transformer", model)
    trunk.pos_encoding = modeling_ctrl.positional_encoding(19, chosen.n_embd, torch.float64)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize("head", HEADS)
def test_ctrl(head: str, config: int, side: str, tmp_path):
    options, labels = HEADS[head]
    verify_decoder(their_model(head, config, **options), tmp_path, side, **labels)


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_weights_chunks_and_texts_are_the_same(config: int, tmp_path):
    verify_writer(their_model("CTRLLMHeadModel", config, attn_implementation="eager"), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layer_norm_epsilon": 1e-5},
            "config.json: layer_norm_epsilon is 1e-05, and only 1e-06 is",
        ),
    ],
)
def test_what_is_not_computed_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        read_config(transformers.CTRLConfig(**SIZES), **options)
    assert str(caught.value).startswith(message)


def test_size():
    """1.63 billion in the paper, section 3.2."""
    theirs = transformers.CTRLConfig()
    assert counts("ctrl", theirs) == (1_637_964_550, 1_637_964_550)
