"""Transformer-XL by name: the parameters of the paper's tables, counted."""

import pytest
import torch

from polyformer.models.presets import create_model, model_config


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
def test_sizes_are_the_papers(name: str, table: float, counted: int):
    with torch.device("meta"):
        model = create_model(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == counted
    assert abs(count / table - 1) < 0.005


def test_the_large_one_counted_by_hand():
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
