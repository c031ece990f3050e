"""DA-Transformer: the properties of its function of the distance, and scores that are clipped at zero."""

import math

import pytest
import torch
from naive import SITE, randomised

from polyformer.attention.functional.attend import attend
from polyformer.attention.positions import DistanceAwareConfig, Shape
from polyformer.attention.positions.by_distance import rescaling
from polyformer.core.sequence.context import Context

BOUNDS = torch.tensor([-3.0, 0.0, 0.7, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("b", BOUNDS.tolist())
def test_the_function_is_the_papers(b: float):
    """f(0) = 1; to 0 at minus infinity; to 1 + e^b at infinity; rising all the way between."""
    distance = torch.linspace(-60, 60, 241, dtype=torch.float64)
    f = rescaling(distance, torch.tensor(b, dtype=torch.float64))
    expected = torch.tensor([(1 + math.exp(b)) / (1 + math.exp(b - r)) for r in distance.tolist()])
    torch.testing.assert_close(f, expected.double(), rtol=1e-6, atol=0)
    assert abs(f[120] - 1) < 1e-14
    assert f[0] < 1e-20
    assert math.isclose(f[-1], 1 + math.exp(b), rel_tol=1e-12)
    assert (f.diff()[:180] > 0).all()
    assert (f.diff() >= 0).all()


def test_nothing_overflows():
    """Where e^b or e^(b - R) is beyond float32; the gradients too."""
    distance = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], requires_grad=True)
    b = torch.tensor([-300.0, 0.0, 60.0, 300.0]).unsqueeze(1).requires_grad_()
    f = rescaling(distance, b)
    assert f.isfinite().all()
    torch.testing.assert_close(f[:, 2], torch.ones(4))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(f.sum(), (distance, b)))


def test_each_head_and_layer_has_its_own():
    position = randomised(DistanceAwareConfig().build(Shape(hidden_size=8, num_layers=3, num_heads=2)))
    assert [tuple(parameter.shape) for parameter in position.parameters()] == [(3, 2), (3, 2)]
    q = torch.zeros(1, 2, 6, 4, dtype=torch.float64)
    h, i, j = torch.arange(2).view(2, 1, 1), torch.arange(6).view(6, 1), torch.arange(6)
    for layer in range(3):
        mod = position.score_mod(q, q, Context(6, 6), SITE[layer])
        modified = mod(torch.ones(2, 6, 6, dtype=torch.float64), torch.tensor(0), h, i, j)
        w, b = position.w[layer].view(2, 1, 1), position.b[layer].view(2, 1, 1)
        expected = (1 + b.exp()) / (1 + (b - w * (i - j).abs()).exp())
        torch.testing.assert_close(modified, expected, rtol=1e-12, atol=0)


def test_it_starts_without_distances():
    """w = b = 0: f is 1 everywhere, what is left is the clipping."""
    position = DistanceAwareConfig().build(Shape(hidden_size=8, num_heads=2)).double()
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    context = Context(5, 5, causal=True)
    output = attend(q, k, v, context=context, score_mod=position.score_mod(q, k, context, SITE[0]))
    scores = (q @ k.mT / 2).relu().masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(output, scores.softmax(-1) @ v, rtol=1e-12, atol=1e-12)


def test_negative_scores_count_as_zero():
    """A key against the query gets what an indifferent one gets, however far."""
    position = randomised(DistanceAwareConfig().build(Shape(hidden_size=4, num_heads=1)))
    q, k = torch.ones(1, 1, 1, 4, dtype=torch.float64), torch.randn(1, 1, 1, 4).abs().double()
    k = torch.cat([-k, torch.zeros_like(k), -5 * k], 2)
    context = Context(1, 3)
    v = torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)
    output = attend(q, k, v, context=context, score_mod=position.score_mod(q, k, context, SITE[0]))
    torch.testing.assert_close(output.flatten(), torch.full((3,), 1 / 3, dtype=torch.float64))
