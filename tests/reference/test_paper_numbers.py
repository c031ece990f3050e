"""Parameter counts of the first Transformer, derived here from the dimensions in its paper.

Those of families with published weights are in families.yaml.
"""

import pytest
import torch

from polyformer.models.presets import create_model


def attention(width: int) -> int:
    """Four projections with biases."""
    return 4 * (width * width + width)


def feedforward(width: int, inner: int) -> int:
    return width * inner + inner + inner * width + width


def norm(width: int) -> int:
    return 2 * width


def encoder_layer(width: int, inner: int) -> int:
    return attention(width) + feedforward(width, inner) + 2 * norm(width)


def decoder_layer(width: int, inner: int) -> int:
    """With cross-attention."""
    return 2 * attention(width) + feedforward(width, inner) + 3 * norm(width)


def transformer(vocab: int, layers: int, width: int, inner: int) -> int:
    """One token table for source, target and output (section 3.4); sinusoids have no parameters."""
    return vocab * width + layers * (encoder_layer(width, inner) + decoder_layer(width, inner))


@pytest.mark.parametrize(
    ("name", "formula", "count", "millions"),
    [
        ("transformer-base", transformer(37000, 6, 512, 2048), 63_082_496, 65),
        ("transformer-big", transformer(37000, 6, 1024, 4096), 214_245_376, 213),
    ],
)
def test_parameters(name: str, formula: int, count: int, millions: int):
    """`millions` is what the paper prints, from a vocabulary that it gives roughly."""
    with torch.device("meta"):
        model = create_model(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == formula == count
    assert abs(count / 1e6 - millions) < 5
