"""Transformer-XL's relative positions: the sinusoids it projects, its two biases, and how much it makes."""

import pytest
import torch
from naive import SITE, randomised

from polyformer.core.errors import InputError
from polyformer.position import Shape, TransformerXLConfig, sinusoids
from polyformer.sequence.context import Context

SHAPE = Shape(hidden_size=10, num_layers=3, num_heads=4, head_size=3)


def test_keys_are_projected_sinusoids_of_the_distances_of_the_call():
    """One new token after six: distances 0 to 6 and no others."""
    position = randomised(TransformerXLConfig().build(SHAPE))
    q = torch.randn(2, 4, 1, 3, dtype=torch.float64)
    relative = position.relative(q, q, Context(1, 7, causal=True), SITE[2])
    assert relative.first == 0
    expected = (
        (sinusoids(torch.arange(7), 10) @ position.projections[2].weight.T).view(7, 4, 3).transpose(0, 1)
    )
    torch.testing.assert_close(relative.position_keys, expected, rtol=0, atol=1e-13)


def test_an_encoder_has_both_sides():
    position = randomised(TransformerXLConfig(clamp_distance=2).build(SHAPE))
    q = torch.randn(1, 4, 4, 3, dtype=torch.float64)
    relative = position.relative(q, q, Context(4, 4), SITE[0])
    assert relative.first == -3
    waves = sinusoids(torch.tensor([-2, -2, -1, 0, 1, 2, 2]), 10)
    expected = (waves @ position.projections[0].weight.T).view(7, 4, 3).transpose(0, 1)
    torch.testing.assert_close(relative.position_keys, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shared", [False, True])
def test_u_meets_the_keys_and_v_the_distances(shared: bool):
    position = randomised(TransformerXLConfig(shared_biases=shared).build(SHAPE))
    q, k = torch.randn(2, 1, 4, 5, 3, dtype=torch.float64)
    context, own = Context(5, 5, causal=True), 0 if shared else 1
    shifted, same = position.rotate(q, k, context, SITE[1])
    assert same is k
    torch.testing.assert_close(shifted, q + position.u[own], rtol=0, atol=0)
    content = position.relative(shifted, k, context, SITE[1]).content
    torch.testing.assert_close(content, q + position.v[own], rtol=0, atol=1e-14)


def test_sizes():
    """W_R [H D, E] a layer; u and v [H, D] a layer, or once."""
    for shared, sets in ((False, 3), (True, 1)):
        count = sum(
            parameter.numel()
            for parameter in TransformerXLConfig(shared_biases=shared).build(SHAPE).parameters()
        )
        assert count == 3 * 12 * 10 + sets * 2 * 12


def test_a_clamp_of_nothing_is_refused():
    with pytest.raises(InputError, match="clamp_distance: expected 1 token or more, or none, got 0"):
        TransformerXLConfig(clamp_distance=0)
