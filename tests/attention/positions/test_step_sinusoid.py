"""The Universal Transformer's sinusoids of position and step."""

import math

import pytest
import torch

from polyformer.attention.positions import Shape, StepSinusoidConfig
from polyformer.core.errors import InputError


@pytest.mark.parametrize("width", [6, 7])
def test_the_equation(width: int):
    """PE(p, t, 2i) = sin(p / 10000^(2i/E)) + sin(t / 10000^(2i/E)), cosines at 2i + 1; at every layer."""
    position = StepSinusoidConfig().build(Shape(hidden_size=width, num_layers=4))
    x = torch.randn(2, 5, width, dtype=torch.float64)
    for t in range(4):
        added = position.embed(x, torch.arange(5), t) - x
        for p in range(5):
            for c in range(width):
                wave, size = (math.cos if c % 2 else math.sin), 10000 ** (2 * (c // 2) / width)
                expected = wave(p / size) + wave(t / size)
                assert math.isclose(added[0, p, c], expected, abs_tol=1e-12)
                assert math.isclose(added[1, p, c], expected, abs_tol=1e-12)
    assert list(position.parameters()) == []


def test_positions_of_rows():
    position = StepSinusoidConfig(base=50.0).build(Shape(hidden_size=6))
    x, pos = torch.zeros(2, 3, 6), torch.tensor([[0, 1, 2], [0, 0, 1]])
    embedded = position.embed(x, pos, 2)
    assert embedded.dtype == torch.float32
    assert torch.equal(embedded[1, 2], embedded[0, 1])
    assert torch.equal(embedded[1, 0], embedded[1, 1])
    assert not torch.equal(embedded, position.embed(x, pos, 3))


def test_base_is_checked():
    with pytest.raises(InputError, match=r"base: expected a number above 1, got 0\.5"):
        StepSinusoidConfig(base=0.5)
