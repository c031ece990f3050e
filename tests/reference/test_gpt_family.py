"""GPT with every head, loaded from transformers' files and saved back."""

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

from polyformer.core.errors import InputError  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 19,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"afn": "relu", "layer_norm_epsilon": 1e-3, "n_layer": 3, "n_head": 2, "tie_word_embeddings": False},
    {"afn": "swish", "resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.4},
]
HEADS: dict[str, Any] = {
    "OpenAIGPTLMHeadModel": ({}, {}),
    "OpenAIGPTModel": ({}, {}),
    "OpenAIGPTForSequenceClassification": (
        {"num_labels": 3},
        {"labels": {"labels": torch.tensor([2, 0, 1])}},
    ),
}


def their_model(head: str, config: int, **options: Any) -> Any:
    torch.manual_seed(7)
    chosen = {**SIZES, **CONFIGS[config], **options}
    return getattr(transformers, head)(transformers.OpenAIGPTConfig(**chosen))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize("head", HEADS)
def test_gpt(head: str, config: int, side: str, tmp_path):
    options, labels = HEADS[head]
    verify_decoder(their_model(head, config, **options), tmp_path, side, **labels)


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_weights_chunks_and_texts_are_the_same(config: int, tmp_path):
    """Theirs keeps no cache: it reads the whole text again for every token."""
    verify_writer(their_model("OpenAIGPTLMHeadModel", config), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"afn": "gelu_new"}, "unknown afn 'gelu_new': did you mean 'gelu'"),
        ({"architectures": ["OpenAIGPTNoHead"]}, "unknown architecture of 'openai-gpt' 'OpenAIGPTN"),
    ],
)
def test_what_is_not_computed_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        read_config(transformers.OpenAIGPTConfig(**SIZES), **options)
    assert str(caught.value).startswith(message)


def test_size():
    theirs = transformers.OpenAIGPTConfig()
    assert counts("gpt", theirs) == (116_534_784, 116_534_784)
