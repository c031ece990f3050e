"""GPT-J with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from decoders import (  # noqa: E402
    Double,
    counts,
    read_config,
    verify_decoder,
    verify_writer,
)
from transformers.models.gptj import modeling_gptj  # noqa: E402

from polyformer.checkpoints.families import gptj  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402
from polyformer.presets import MODELS  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 19,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {
        "n_embd": 98,
        "n_head": 2,
        "rotary_dim": 6,
        "n_inner": 20,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-3,
    },
    {"n_layer": 3, "rotary_dim": 8, "tie_word_embeddings": True, "resid_pdrop": 0.2, "attn_pdrop": 0.3},
]
HEADS: dict[str, Any] = {
    "GPTJForCausalLM": ({}, {}),
    "GPTJModel": ({}, {}),
    "GPTJForSequenceClassification": ({"num_labels": 3}, {"labels": {"labels": torch.tensor([2, 0, 1])}}),
    "GPTJForQuestionAnswering": ({}, {}),
}


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(modeling_gptj, "torch", Double())


def their_model(head: str, config: int, **options: Any) -> Any:
    """With its tables of waves in float64, where they are made in float32."""
    torch.manual_seed(7)
    chosen = transformers.GPTJConfig(**{**SIZES, **CONFIGS[config], **options})
    model = getattr(transformers, head)(chosen)
    even = torch.arange(0, chosen.rotary_dim, 2, dtype=torch.float64)
    angles = torch.arange(19).unsqueeze(1) * 10000.0 ** (-even / chosen.rotary_dim)
    for layer in getattr(model, "transformer", model).h:
        layer.attn.embed_positions = torch.cat([angles.sin(), angles.cos()], 1)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", range(len(CONFIGS)))
@pytest.mark.parametrize("head", HEADS)
def test_gptj(head: str, config: int, side: str, tmp_path):
    options, labels = HEADS[head]
    verify_decoder(their_model(head, config, **options), tmp_path, side, **labels)


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_weights_chunks_and_texts_are_the_same(config: int, tmp_path):
    verify_writer(their_model("GPTJForCausalLM", config, attn_implementation="eager"), tmp_path)


@pytest.mark.parametrize("width", [6, 10, 49, 80, 98, 256])
def test_every_number_of_rotated_channels_comes_back(width: int):
    for rotary_dim in range(2, width + 1, 2):
        assert int(width * gptj.rotary_fraction(rotary_dim, width)) == rotary_dim


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_dim": None}, "config.json: rotary_dim is None; expected an even number up to 8"),
        ({"rotary_dim": 10}, "config.json: rotary_dim is 10; expected an even number up to 8"),
    ],
)
def test_what_is_not_computed_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        read_config(transformers.GPTJConfig(**SIZES), **options)
    assert str(caught.value).startswith(message)


def test_size():
    theirs = transformers.GPTJConfig()
    assert counts("gpt-j-6b", theirs) == (6_050_882_784, 6_050_882_784)
    assert MODELS["gpt-j-6b"]().decoder == read_config(theirs).decoder
