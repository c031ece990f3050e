"""Sinusoids: the equation, the shift property, far positions."""

import math

import pytest
import torch

from polyformer.attention.positions import Shape, SinusoidalConfig, sinusoids
from polyformer.core.errors import InputError


@pytest.mark.parametrize("width", [6, 7])
def test_the_equation(width: int):
    """PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos of the same; positions count from 0."""
    table = sinusoids(torch.arange(9), width)
    assert table.shape == (9, width)
    for p in range(9):
        for j in range(width):
            angle = p / 10000 ** (2 * (j // 2) / width)
            assert math.isclose(table[p, j], math.cos(angle) if j % 2 else math.sin(angle), abs_tol=1e-14)
    assert table[0].tolist() == [float(j % 2) for j in range(width)]


@pytest.mark.parametrize("shift", [1, 3, 100])
def test_a_shift_is_one_linear_map(shift: int):
    """PE(p + k) = M_k PE(p), with M_k made of rotations that do not depend on p."""
    width = 8
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for i in range(0, width, 2):
        angle = shift / 10000 ** (i / width)
        matrix[i, i] = matrix[i + 1, i + 1] = math.cos(angle)
        matrix[i, i + 1], matrix[i + 1, i] = math.sin(angle), -math.sin(angle)
    p = torch.arange(50)
    shifted = sinusoids(p, width) @ matrix.T
    torch.testing.assert_close(shifted, sinusoids(p + shift, width), rtol=0, atol=1e-12)


def test_it_is_added_to_the_first_layer_alone():
    position = SinusoidalConfig(base=50.0).build(Shape(hidden_size=6))
    x, pos = torch.randn(2, 4, 6), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    torch.testing.assert_close(position.embed(x, pos, 0), x + sinusoids(pos, 6, 50.0).float())
    assert position.embed(x, pos, 1) is x
    assert position.embed(x, pos[0], 0).shape == x.shape
    assert list(position.parameters()) == []


@pytest.mark.parametrize("width", [6, 7])
def test_all_sines_may_stand_before_all_cosines(width: int):
    x, pos = torch.zeros(1, 5, width, dtype=torch.float64), torch.arange(5)
    embedded = SinusoidalConfig(layout="halves").build(Shape(hidden_size=width)).embed(x, pos, 0)[0]
    sines = (width + 1) // 2
    for p in range(5):
        for j in range(width):
            angle = p / 10000 ** (2 * (j % sines) / width)
            assert math.isclose(
                embedded[p, j], math.sin(angle) if j < sines else math.cos(angle), abs_tol=1e-14
            )


@pytest.mark.parametrize("width", [6, 7, 2])
def test_factors_may_end_with_the_base(width: int):
    """As in tensor2tensor: sin(p / 10000^(i / (half - 1))), a zero where the width is odd; from an offset."""
    config = SinusoidalConfig(layout="halves", inclusive=True, offset=2)
    x, pos = torch.zeros(1, 5, width, dtype=torch.float64), torch.arange(5)
    embedded = config.build(Shape(hidden_size=width)).embed(x, pos, 0)[0]
    half = width // 2
    for p in range(5):
        for i in range(half):
            angle = (p + 2) / 10000 ** (i / max(half - 1, 1))
            assert math.isclose(embedded[p, i], math.sin(angle), abs_tol=1e-14)
            assert math.isclose(embedded[p, half + i], math.cos(angle), abs_tol=1e-14)
        assert embedded[p, 2 * half :].tolist() == [0.0] * (width % 2)


def test_far_positions_are_exact_in_float32():
    """The angles are made in float64: in float32 a position of a million would be wrong at once."""
    p = 1_000_003
    embedded = (
        SinusoidalConfig().build(Shape(hidden_size=4)).embed(torch.zeros(1, 1, 4), torch.tensor([p]), 0)
    )
    assert abs(float(embedded[0, 0, 0]) - math.sin(p)) < 1e-6


def test_options_are_checked():
    with pytest.raises(InputError, match=r"base: expected a number above 1, got 1\.0"):
        SinusoidalConfig(base=1.0)
    with pytest.raises(InputError, match="unknown layout 'turns': expected one of 'halves', 'pairs'"):
        SinusoidalConfig(layout="turns")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="offset: expected 0 or more, got -1"):
        SinusoidalConfig(offset=-1)
