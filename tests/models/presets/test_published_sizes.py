"""Presets at their published sizes: GPT-3, Transformer-XL, Decision and Vision Transformers, counted."""

from typing import Any

import pytest
import torch

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model, model_config


@pytest.mark.parametrize(
    ("name", "table", "layers", "width", "heads", "head"),
    [
        ("gpt3-125m", 125e6, 12, 768, 12, 64),
        ("gpt3-6.7b", 6.7e9, 32, 4096, 32, 128),
        ("gpt3-175b", 175.0e9, 96, 12288, 96, 128),
    ],
)
def test_gpt3_has_the_sizes_of_the_table(
    name: str, table: float, layers: int, width: int, heads: int, head: int
):
    config = model_config(name)
    stack = config.decoder
    assert stack is not None
    assert (stack.num_hidden_layers, config.hidden_size, stack.attention.num_attention_heads) == (
        layers,
        width,
        heads,
    )
    assert (stack.attention.width(width), config.max_position_embeddings) == (head, 2048)
    with torch.device("meta"):
        model = Transformer(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    plain = 50257 * width + 2048 * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert count == plain
    assert abs(count / table - 1) < 0.01


def test_every_other_layer_of_gpt3_has_a_window():
    stack = model_config("gpt3-125m").decoder
    assert stack is not None
    mechanism = stack.attention.mechanism
    assert isinstance(mechanism, SoftmaxConfig)
    windowed = [isinstance(mechanism.for_layer(layer).pattern, Window) for layer in range(12)]
    assert windowed == [False, True] * 6


def test_a_windowed_layer_attends_to_its_window_alone():
    sizes = {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}
    model = create_model("gpt3-125m", **sizes, vocab_size=23, max_position_embeddings=300).eval()
    ids = torch.randint(23, (1, 300))
    full, window = model(ids, output_attentions=True).attentions
    assert (full[0, :, 299] > 0).all()
    assert (window[0, :, 299, :44] == 0).all()
    assert (window[0, :, 299, 44:] > 0).all()


@pytest.mark.parametrize(
    ("name", "table", "counted"),
    [
        ("transformer-xl-base", 151e6, 151_107_538),
        ("transformer-xl-large", 285e6, 285_205_322),
        ("transformer-xl-enwik8-12", 41e6, 41_055_436),
        ("transformer-xl-enwik8-24", 277e6, 277_231_820),
        ("transformer-xl-1b-large", 0.84e9, 841_354_862),
    ],
)
def test_transformer_xl_has_the_papers_sizes(name: str, table: float, counted: int):
    with torch.device("meta"):
        model = create_model(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == counted
    assert abs(count / table - 1) < 0.005


def test_the_large_transformer_xl_counted_by_hand():
    """Layers, their global queries, four tables with projections, the output's own projection and biases."""
    config = model_config("transformer-xl-large")
    width, inner, layers = 1024, 4096, 18
    layer = 5 * width**2 + 2 * width * inner + inner + width + 4 * width + 2 * width
    tables = sum(
        rows * size for rows, size in zip((20000, 20000, 160000, 67735), (width, 256, 64, 16))
    ) + width * (width + 256 + 64 + 16)
    output = width**2 + config.vocab_size + 3 * width + 3
    with torch.device("meta"):
        model = create_model("transformer-xl-large")
    assert sum(parameter.numel() for parameter in model.parameters()) == layers * layer + tables + output


VISION_MILLIONS = {
    "vit-base-patch16-224": 86.6,
    "vit-large-patch16-224": 304.3,
    "vit-huge-patch14": 632.0,
    "vit-base-patch32-384": 88.3,
    "deit-tiny-patch16-224": 5.7,
    "deit-small-patch16-224": 22.1,
    "deit-base-patch16-224": 86.6,
}


@pytest.mark.parametrize("name", VISION_MILLIONS)
def test_vision_transformers_have_as_many_parameters_as_published(name: str):
    """With 1000 classes."""
    with torch.device("meta"):
        model: Any = create_model(name)
    assert model.config.head.num_labels == 1000
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == VISION_MILLIONS[name]


DECISION_SIZES = {
    "dt-gym": {},
    "dt-atari": {
        "n_layer": 6,
        "n_head": 8,
        "activation_function": "gelu",
        "act_dim": 18,
        "action_tanh": False,
    },
}


@pytest.mark.parametrize(
    ("name", "layers", "heads", "activation"), [("dt-gym", 3, 1, "relu"), ("dt-atari", 6, 8, "gelu")]
)
def test_a_decision_transformer_has_the_papers_sizes_and_as_many_parameters_as_theirs(
    name: str, layers: int, heads: int, activation: str
):
    """Theirs have a table of tokens and one of positions besides, which read nothing but place 0."""
    transformers = pytest.importorskip("transformers")
    config = model_config(name)
    stack = config.decoder
    assert stack is not None
    assert (config.hidden_size, stack.num_hidden_layers, stack.dropout) == (128, layers, 0.1)
    assert stack.attention.num_attention_heads == heads
    assert stack.feedforward.override("activation", activation) == stack.feedforward
    with torch.device("meta"):
        ours = create_model(name)
        theirs = transformers.DecisionTransformerModel(
            transformers.DecisionTransformerConfig(**DECISION_SIZES[name])
        )
    tables = {"encoder.wte.weight", "encoder.wpe.weight"}
    counted = sum(parameter.numel() for key, parameter in theirs.named_parameters() if key not in tables)
    assert sum(parameter.numel() for parameter in ours.parameters()) == counted
